"""Command `comm`: measures latency and bandwidth of collectives between ranks under torchrun.

Every rank runs the command. Rank 0 controls the measurement, writes the run and prints the result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from quantbench.cli.options import command, json_option, option, percentage, results_option
from quantbench.cli.output import Result, encoded, output, plain_table, say, show, warning
from quantbench.errors import QuantbenchError, require_choice
from quantbench.store.record import Failed, Measured, Record, Skipped
from quantbench.timing.options import TimingOptions
from quantbench.units import latency, percent, size
from quantbench.workload import Collective

if TYPE_CHECKING:
    from quantbench.providers.collectives import TorchRanks
    from quantbench.timing.lockstep import Leader

_BACKENDS = ("nccl", "gloo")
# Longest sampling time per point, in s.
_MAX_TIME_S = 1.0
# Limits for warnings. _SPREAD: spread of a point's samples from the 10th to the 90th percentile, as
# a fraction of their median. _DRIFT: difference between the longest and the shortest time of the
# repeated reference point, as a fraction of the shortest.
_SPREAD = 0.10
_DRIFT = 0.05


@dataclass(frozen=True, kw_only=True)
class CommOptions:
    """The options of `comm` as typed; "" means the default."""

    op: str = option(
        "",
        "Collectives, comma separated: all_reduce, all_gather, reduce_scatter, all_to_all, "
        "send_recv, broadcast.",
    )
    sizes: str = option("", "Message sizes: 4KiB:1GiB, 4KiB:1GiB:x2 or a list.")
    dtype: str = option("", "Number format: bf16, fp16, fp32 or int8.")
    backend: str = option("", "nccl or gloo (default: nccl where every rank has a GPU).")
    precision: str = option("2%", "Sample each point until its median is within ± this.")

    def options(self) -> TimingOptions:
        """Returns the timing options.

        The cache is hot, because every sample uses the same buffers.
        """
        half_width = percentage("--precision", self.precision, above=True)
        return TimingOptions(cache="hot", half_width=half_width, max_time_s=_MAX_TIME_S)

    def plan(self, backend: str, num_gpus: int, num_nodes: int) -> tuple[Collective, ...]:
        """Returns the collectives to measure.

        backend: nccl or gloo. The default dtype and message sizes depend on the backend.
        num_gpus: number of ranks.
        num_nodes: number of nodes with ranks.
        """
        from quantbench.comm.session import DEFAULT_OPS, DEFAULT_SIZES, parse_sizes, points

        op = self.op or ",".join(DEFAULT_OPS)
        ops = tuple(word.strip().replace("-", "_") for word in op.split(","))
        dtype = self.dtype or ("bf16" if backend == "nccl" else "fp32")
        wanted = parse_sizes(self.sizes or DEFAULT_SIZES[backend])
        return points(ops, wanted, num_gpus=num_gpus, num_nodes=num_nodes, dtype=dtype)


@command
def comm(
    arguments: CommOptions, results: Path = results_option(), as_json: bool = json_option()
) -> Result | None:
    """Measure collectives over message sizes: torchrun --nproc-per-node=8 -m quantbench comm."""
    from quantbench import device
    from quantbench.device.spec import DeviceState
    from quantbench.timing.lockstep import Leader, follow

    arguments.options()
    if arguments.backend:
        require_choice("comm", "backend", arguments.backend, _BACKENDS)
    # Wrong ops, sizes and dtypes raise an error here, before the ranks wait for each other.
    arguments.plan("gloo", 2, 1)
    from quantbench.providers.collectives import TorchRanks, TorchWork, backend_here, topology

    lines = libraries_to_stderr() if as_json else nullcontext()
    with lines, TorchRanks(arguments.backend or backend_here()) as ranks:
        places = ranks.gather(topology(ranks))
        on_gpu = ranks.backend == "nccl"
        state = device.monitor(device.current()) if on_gpu else DeviceState
        work = TorchWork(ranks, state)
        if ranks.rank:
            follow(ranks, work)
            return None
        leader = Leader(ranks, work)
        # After a complete run or an expected error, the other ranks wait until the leader stops
        # them. After Ctrl-C or a bug in this process, torchrun ends the other ranks.
        try:
            result = _lead(arguments, ranks, leader, places, results, output(stderr=as_json))
        except QuantbenchError:
            leader.stop()
            raise
        leader.stop()
        return result


@contextmanager
def libraries_to_stderr() -> Iterator[None]:
    """Redirects file descriptor 1 to stderr, because gloo and NCCL write messages to it."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _lead(
    arguments: CommOptions,
    ranks: TorchRanks,
    leader: Leader,
    places: list[object] | None,
    results: Path,
    console: Console,
) -> Result:
    """Measures all collectives as rank 0, and writes the run.

    leader: controls the other ranks during the measurement.
    places: topology of each rank, which is stored in the run.
    results: folder in which the run folder is created.
    console: console for the progress.
    """
    from quantbench import device
    from quantbench.comm.session import CommSession
    from quantbench.device.here import warnings_for
    from quantbench.providers.identity import versions
    from quantbench.store.environment import relevant_environment
    from quantbench.store.folder import RunWriter
    from quantbench.store.run import RunInfo

    options = arguments.options()
    spec = device.current()
    state = device.monitor(spec)
    plan = arguments.plan(ranks.backend, ranks.world_size, ranks.num_nodes)
    started = datetime.now(UTC)
    warnings = warnings_for(spec, state())
    info = RunInfo(
        run_id=f"{started:%Y-%m-%dT%H%M%S}-comm-{ranks.backend}-{ranks.world_size}",
        device=spec,
        state=state(),
        software=versions(),
        axes={"message_bytes": sorted({c.message_bytes for c in plan})},
        options={
            "command": "comm",
            "backend": ranks.backend,
            "arguments": asdict(arguments),
            "timing": asdict(options),
            "topology": {
                "world_size": ranks.world_size,
                "num_nodes": ranks.num_nodes,
                "ranks": places,
            },
            "warnings": warnings,
        },
        seed=options.seed,
        environment=relevant_environment(),
        started=started.isoformat(timespec="seconds"),
    )
    ranks_line = f"{ranks.world_size} ranks on {ranks.num_nodes} nodes over {ranks.backend}"
    points_line = f"{len(plan)} points, {options.max_time_s:g} s of sampling each at most"
    lines = (f"{ranks_line}; rank 0 on {spec.name}", *map(warning, warnings), points_line)
    show(console, lines)
    records: list[Record] = []
    with RunWriter.create(results, info) as writer:

        def keep(record: Record) -> None:
            writer.append(record)
            records.append(record)
            row = row_to_json(record)
            time, _, bus, _, trust, text = _cells(row)
            if trust:
                text = f"{time}, {bus} GB/s, trust {trust}"
            say(console, f"  {len(records):3} {row['op']} {size(row['message_bytes'])}: {text}")

        session = CommSession(
            leader,
            backend=ranks.backend,
            run_id=info.run_id,
            spec=spec,
            state=state,
            options=options,
            on_record=keep,
        )
        how = "interrupted"
        try:
            session.run(plan)
            how = "complete"
        finally:
            writer.end(how, {})
    rows = [row for row in map(row_to_json, records) if row["role"] == "point"]
    measured = [row for row in rows if "latency_us" in row]
    doubts = spread_warnings(measured, session.reference_us)
    answer = {
        "folder": writer.folder,
        "points": rows,
        "reference_us": session.reference_us,
        "warnings": doubts,
    }
    columns = ("op", ">message", ">time", ">algorithm GB/s", ">bus GB/s", ">spread", "trust", "")
    cells = [(row["op"], size(row["message_bytes"]), *_cells(row)) for row in rows]
    table = plain_table(columns, cells)
    said = (table, *map(warning, doubts), str(writer.folder))
    return Result(answer, said, exit_code=not measured)


def spread_warnings(rows: Sequence[dict[str, Any]], reference_us: Sequence[float]) -> list[str]:
    """Returns warnings about scattering samples and about a drifting reference point.

    The limits are _SPREAD and _DRIFT.

    rows: measured points as `row_to_json` returns them.
    reference_us: median time in each repetition of the reference point, in µs.
    """
    wide = [row for row in rows if row["spread"] > _SPREAD]
    found = []
    if wide:
        worst = max(wide, key=itemgetter("spread"))
        found.append(
            f"{len(wide)} of {len(rows)} points scatter by more than {percent(_SPREAD)}, the "
            f"worst by {percent(worst['spread'])} ({worst['op']} {size(worst['message_bytes'])}): "
            "the network or the hosts are shared."
        )
    apart = max(reference_us, default=1.0) / min(reference_us, default=1.0) - 1
    if apart > _DRIFT:
        found.append(
            f"The repeated point took {percent(apart)} longer at one time than at another: "
            "differences below that between two settings mean nothing here."
        )
    return found


def row_to_json(record: Record) -> dict[str, Any]:
    """Converts the record of a collective to a JSON object.

    The object has the collective's sizes. If the collective was measured, the object also has its
    time, bandwidths and grade. Otherwise it has the reason in `skipped` or `failed`.
    """
    from quantbench.comm.session import figures
    from quantbench.stats import spread

    work = record.workload
    assert isinstance(work, Collective)
    names = ("op", "message_bytes", "num_gpus", "num_nodes", "dtype")
    sizes = {name: getattr(work, name) for name in names}
    row: dict[str, Any] = {"role": record.role, **sizes, "provider": record.provider}
    match record.outcome:
        case Measured(measurement, graded):
            stated = measurement.stated
            row |= {
                **encoded(figures(work, stated.latency_us)),
                "spread": spread(measurement.samples_us),
                "samples": len(measurement.samples_us),
                "relative_half_width": stated.relative_half_width,
                "grade": graded,
            }
        case Skipped(reason):
            row["skipped"] = reason
        case Failed(kind, message):
            row["failed"] = f"{kind}: {message}"
    return row


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Formats the cells of a table row: time, two bandwidths, spread, grade and reason.

    The reason is why the grade is below A, or why there is no time.

    row: point as `row_to_json` returns it.
    """
    if "latency_us" not in row:
        (why,) = [f"{name}: {row[name]}" for name in ("skipped", "failed") if name in row]
        return (*"––––", "", why)
    rates = (f"{row[name]:.3g}" for name in ("algorithm_gb_per_s", "bus_gb_per_s"))
    grade = row["grade"]
    return (
        latency(row["latency_us"]),
        *rates,
        percent(row["spread"]),
        grade.letter,
        "; ".join(grade.reasons[:1]),
    )
