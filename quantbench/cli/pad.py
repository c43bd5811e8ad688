"""Command `pad`: says whether padding a product saves time, to what, and what it costs.

`advice.pad` does the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from quantbench.cli.devices import device_line
from quantbench.cli.options import (
    command,
    gpu_option,
    json_option,
    library_option,
    option,
    profile_option,
)
from quantbench.cli.output import StyledLine, encoded, plain_table, print_result
from quantbench.device import default_dtype
from quantbench.errors import InputError, require_choice
from quantbench.latency.libraries import LIBRARIES
from quantbench.units import latency, signed_percent, size
from quantbench.workload import Gemm
from quantbench.workload.dtypes import GEMM_DTYPES

if TYPE_CHECKING:
    from quantbench.advice.pad import Padding, PaddingVerdict
    from quantbench.alignment_rules import Broken

_WHO = "pad"
_WORDS = {
    "must": ("must pad, it crashes", "bold red"), "sure": ("pad", "bold green"),
    "worth": ("pad, but measure first", "yellow"), "no": ("keep", ""),
}  # fmt: skip


@command
def pad(
    gpu: str = gpu_option(""),
    m: int = option(..., "Rows: tokens.", "--m", "-m", min=1),
    n: int = option(..., "Columns: outputs of a linear layer, on one GPU.", "--n", "-n", min=1),
    k: int = option(
        ..., "Inner dimension: inputs of a linear layer, on one GPU.", "--k", "-k", min=1
    ),
    dtype: str = option(
        "", f"Number format: {', '.join(GEMM_DTYPES)} (default: the device's usual one)."
    ),
    layout: str = option("nt", "nt (weights stored n×k), nn or tn."),
    library: str = library_option(),
    profile: Path | None = profile_option(),
    as_json: bool = json_option(),
) -> None:
    """Say whether padding a product saves time, and what it costs. m is padded in every call, n and
    k once.
    """
    from quantbench.advice.pad import padding_verdict
    from quantbench.cli.times import chosen_times

    times, _ = chosen_times(_WHO, gpu, library, profile)
    spec = times.device
    assumed = [] if dtype else [f"dtype = {default_dtype(spec)}"]
    dtype = dtype or default_dtype(spec)
    if spec.peak(dtype) is None:
        raise InputError(_WHO, f"--dtype {dtype} on {spec.name}", f"one of {spec.dtypes}")
    require_choice(_WHO, "--library", library, ("", *LIBRARIES))
    verdict = padding_verdict(
        Gemm(m, n, k, dtype=dtype, layout=layout), spec, library=library, times=times
    )
    assumed.append("padded in every call: m; padded once: n, k")
    advised = [one.words for one in verdict.advised]
    answer = {**encoded(verdict), "device": spec.name, "assumed": assumed, "advised": advised}
    print_result(as_json, lambda: answer, _lines(verdict, assumed, library, profile))


# --- output ----------------------------------------------------------------------------------------------------------


def _lines(
    verdict: PaddingVerdict, assumed: Sequence[str], library: str, profile: Path | None
) -> Iterator[StyledLine | Table]:
    """library, profile: as typed."""
    from quantbench.latency.model_times import chosen_libraries

    spec, gemm, now = verdict.device, verdict.gemm, verdict.now
    if now.unmeasured:
        yield f"not measured, only estimated: {now.unmeasured}"
    yield device_line(spec)
    yield f"times: {verdict.note}"
    words = f"times of {profile}"
    if profile is None:
        words = chosen_libraries(spec, gemm.dtype, library, _WHO, experts=False)
    yield f"{words}; assumed: {', '.join(assumed)}"
    yield f"{gemm}: {latency(now.latency_us)} ({latency(now.low_us)} to {latency(now.high_us)})"
    yield from broken_lines(verdict.broken)
    yield ""
    yield from _table(verdict)
    best = verdict.best
    if best is not None:
        yield _verdict(best), f": {best.words}"
    elif verdict.options:
        yield (
            _WORDS["no"],
            ": no padding is expected to save as much as measured times scatter (2 %)",
        )
    yield f"Next, on such a card, measure it: quantbench sweep {_sweep_words(gemm, verdict.options)}"


def _verdict(one: Padding) -> tuple[str, str]:
    return _WORDS["must" if one.repairs else "sure" if one.sure else "worth" if one.worth else "no"]


def broken_lines(broken: Sequence[Broken]) -> Iterator[StyledLine]:
    """Yields a line for each broken rule, and their sources."""
    styles = {"crashes": "bold red", "falls back": "yellow", "wastes": ""}
    for one in broken:
        ops = f" [{', '.join(one.ops)}]" if one.ops else ""
        yield ("rule: ", styles[one.rule.effect]), one.words + ops
    sources = dict.fromkeys(source for one in broken for source in one.rule.sources)
    if sources:
        yield f"sources of the rules: {', '.join(sources)}"


def _table(verdict: PaddingVerdict) -> Iterator[Table | str]:
    from quantbench.latency.gemm.inputs import LARGEST_SIDE

    if not verdict.options:
        past = any(getattr(verdict.gemm, side) % 256 for side in "mnk")
        limit = f" or have no larger one up to {LARGEST_SIDE}, the largest size" if past else ""
        yield f"m, n and k are multiples of 256{limit}: nothing to pad"
        return
    titles = (
        "pad",
        ">product",
        ">copies",
        ">saving",
        ">low to high",
        ">more memory",
        "when",
        "verdict",
    )
    table = plain_table(titles, fold=("pad",))
    for one in verdict.options:
        said, style = _verdict(one)
        when = {change.at_run_time for change in one.changes}
        table.add_row(
            one.words,
            latency(one.then.latency_us),
            latency(one.copy_us) if one.copy_bytes else "none",
            f"{signed_percent(one.saving)} ({latency(abs(one.saving_us))})",
            f"{signed_percent(one.low)} to {signed_percent(one.high)}",
            size(one.more_bytes),
            "every call" if when == {True} else "once" if when == {False} else "both",
            Text(said, style=style),
        )
    yield table
    yield "saving: share of the time saved, copies included, with its 90 % interval; negative if padding costs time"


def _sweep_words(gemm: Gemm, options: Sequence[Padding]) -> str:
    """Formats the options with which `quantbench sweep` measures the product and the padded one."""
    to = {one.dimension: f",{one.to}" for one in options[0].changes} if options else {"m": ""}
    axes = [f"--dim {side}={getattr(gemm, side)}{padded}" for side, padded in to.items()]
    rest = [f"-{side} {getattr(gemm, side)}" for side in "mnk" if side not in to]
    return " ".join([*axes, *rest, f"--layout {gemm.layout} --dtype {gemm.dtype}"])
