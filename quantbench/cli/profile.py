"""`quantbench profile`: make, read, query and export the profile of a GPU, the file that planners load.

Its commands in order: export, show, validate, query, blindspots. What a profile prints as is in `profile_print`.
"""

from __future__ import annotations

import csv
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from threadpoolctl import threadpool_limits  # comes with scikit-learn, which needs it

from quantbench.cli import profile_print as view
from quantbench.cli.devices import device_line
from quantbench.cli.options import AsJson, grouped, integers, percentage
from quantbench.cli.output import check_file, check_folder, output, plain_table, print_json, say
from quantbench.errors import InputError, StoreError, printable, require_choice, require_int
from quantbench.files import folders_with, read_text
from quantbench.profile import Estimate, Estimates, Profile
from quantbench.profile.blindspots import TARGETS, FloatArray, replay
from quantbench.profile.blindspots_report import (
    CONSUMERS,
    Blindspots,
    around_markers,
    consumer_of,
    find,
    found_to_json,
    measured_products,
    replay_cells,
    replay_columns,
    replay_markdown,
    replay_to_json,
    spot_line,
    summary,
    thin_model,
    write_between,
)
from quantbench.profile.exporters import FORMATS
from quantbench.profile.exporters import export_profile as write_format
from quantbench.profile.exporters.options import WHO, ExportOptions
from quantbench.report.source import read_one_run
from quantbench.units import percent

#: the format of a profile itself; the others are in `profile.exporters`
PROFILE = "profile"
#: who is named by errors of `blindspots`, and the markers in docs that its table stands between
BLINDSPOTS, SECTION = "profile blindspots", "blindspots"

# On one core of a 2024 server: fitting takes as long for 800 rows as for 8,000, cliffs as long as there are records.
_FIXED_S = {True: 15.0, False: 4.0}
_PER_RECORD_S = 3e-4
_FEWEST_MODEL_ROWS = 20
_MOST_MODEL_ROWS = 20_000
_SHOWN = 10
# Longer ones are no sizes, and int() refuses the very long.
_DIGITS = re.compile("[0-9]{1,19}")
_OP = re.compile("[a-z_]{1,20}")
# What each kind is typed as, and how many sizes that are.
_QUERIES = {
    "gemm": ("m,n,k or m,n,k,batch", (3, 4)),
    "softmax": ("batch,rows,cols", (3,)),
    "attention": ("batch,heads,seq,head_dim or batch,heads,seq,head_dim,kv_heads", (4, 5)),
    "collective": ("op,bytes,gpus or op,bytes,gpus,nodes, such as all_reduce,67108864,8", (2, 3)),
}

profile = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Make, read and export a GPU's tables, models and cliffs as one file.",
)

File = Annotated[Path, typer.Argument(help="A profile's JSON file.", metavar="FILE")]
Bound = Annotated[str, typer.Option("--bound", help="Largest error of linear interpolation between the rows.")]


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """The options of planners' formats."""

    provider: Annotated[str, typer.Option(help="Export only this provider's rows (planner formats).")] = ""
    dtype: Annotated[str, typer.Option(help="Export only this number format (planner formats).")] = ""
    layout: Annotated[
        str, typer.Option(help="Export only products of this layout: nt, nn or tn (planner formats).")
    ] = ""
    backend: Annotated[str, typer.Option(help="aiconfigurator: vllm, sglang or trtllm.")] = "vllm"
    version: Annotated[
        str, typer.Option("--as-version", help="aiconfigurator: version under which it finds the table.")
    ] = "quantbench"
    model: Annotated[str, typer.Option(help="vidur: model whose shapes are exported (llama-3-8b, …).")] = ""
    tp: Annotated[str, typer.Option(help="vidur: tensor-parallel degrees, comma separated.")] = "1"
    fill: Annotated[
        bool, typer.Option("--fill", help="aiconfigurator: add modelled rows at edges between measured ones.")
    ] = False
    bound: Bound = "5%"

    def options(self) -> ExportOptions:
        """As the exporters take them."""
        return ExportOptions(
            provider=self.provider, dtype=self.dtype, layout=self.layout, backend=self.backend, version=self.version,
            model=self.model, tensor_parallel=degrees(self.tp), fill=self.fill,
            bound=percentage("--bound", self.bound, above=True),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BlindspotOptions:
    """The options of `blindspots`."""

    consumer: Annotated[str, typer.Option("--for", help="Planner whose interpolation is tested: aiconfigurator.")]
    bound: Bound = "5%"
    target: Annotated[str, typer.Option("--of", help="Error that --bound applies to: p95 or max.")] = "p95"
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out",
            help="Test on held-out rows: keep powers of two of m, select rows to add, compare with the others.",
        ),
    ] = False
    rows: Annotated[int, typer.Option(help="Most rows of a run that its model is fitted to.")] = 1000
    shapes: Annotated[Path | None, typer.Option(help="CSV file for the rows to add, for `sweep --shapes`.")] = None
    docs: Annotated[
        Path | None, typer.Option(help="With --held-out: write the table between the markers of this file.")
    ] = None

    @property
    def share(self) -> float:
        """--bound as a share."""
        return percentage("--bound", self.bound, above=True)


# --- export ----------------------------------------------------------------------------------------------------------


@profile.command(short_help="Make a profile or a planner's files from runs.")
@grouped
def export(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs of one device, or the device's own folder with all of them.", metavar="RUN…"
        ),
    ],
    planner: PlannerOptions,
    target: Annotated[
        Path | None, typer.Option("--output", "-o", help="File (of other formats: folder) to write.")
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--format", help="profile; or for a planner: aiconfigurator, vidur, llm-analysis, calculon, csv, parquet."
        ),
    ] = PROFILE,
    fit: Annotated[bool, typer.Option(help="Fit models to the rows (otherwise use shipped models).")] = True,
    as_json: AsJson = False,
) -> None:
    """Write the tables, fitted models, cliffs and rule verdicts of a device's runs to one file, or convert runs or a
    profile to a planner's format."""
    if to == PROFILE:
        _export_profile(runs, target, fit, as_json)
    else:
        _export_format(runs, to, target, planner.options(), fit, as_json)


def _export_profile(paths: list[Path], target_file: Path | None, fit: bool, as_json: bool) -> None:
    """Make a profile of runs and write it: without a name, as profile.json beside a device's runs, or here."""
    runs = [read_one_run(run) for path in paths for run in runs_below(path)]
    a_device = len(paths) == 1 and runs_below(paths[0]) != paths
    target = target_file or (paths[0] / "profile.json" if a_device else Path("profile.json"))
    check_file("profile export", target)
    records = sum(len(run.records) for run in runs)
    fits = fit and runs[0].info.device.kind == "cuda"  # processors have no model
    seconds = _FIXED_S[fits] + records * _PER_RECORD_S
    say(
        output(stderr=True),
        f"{records:,} record{'' if records == 1 else 's'}: cliffs, rules and models take about {seconds:.0f} s",
    )
    made = Profile.from_runs(runs, fit=fit)
    target.parent.mkdir(parents=True, exist_ok=True)
    made.save(target)
    if as_json:
        print_json({"profile": target, **view.profile_to_json(made)})
        return
    console = output()
    say(console, device_line(made.device))
    for line in (*view.origin_lines(made), *view.rows_lines(made), *view.model_lines(made)):
        say(console, printable(line))
    say(console, f"\nwritten: {target}" + "".join(f", {beside.name}" for beside in files_beside(target)))
    say(console, f"next: quantbench profile show {target}")


def _export_format(
    paths: list[Path], name: str, target: Path | None, options: ExportOptions, fit: bool, as_json: bool
) -> None:
    """Write a profile, or what runs make one, in a planner's format, and say what is in it."""
    folder = target or Path(name)
    require_choice(WHO, "--format", name, FORMATS)
    check_folder(WHO, folder)
    made = write_format(profile_of(paths, fit=fit), name, folder, options)
    if as_json:
        answer = {
            "format": name, "folder": folder, "paths": made.paths, "rows": made.rows, "left_out": made.left_out,
            "notes": made.notes, "use": made.use,
        }  # fmt: skip
        print_json(answer)
        return
    console = output()
    say(console, f"{folder}: " + ", ".join(f"{count:,} {kind}" for kind, count in made.rows.items()))
    for reason, count in made.left_out.most_common():
        say(console, f"  {count:,} rows left out: {reason}")
    for note in made.notes:
        say(console, f"  {note}")
    for line in made.use:
        say(console, f"use: {line}")


def runs_below(path: Path) -> list[Path]:
    """A run's folder itself, or the runs in a device's folder. Raises InputError where there is none."""
    if os.path.isfile(path):
        raise InputError("read run", f"{path} is a file", "folders of runs, or --format with a profile's file")
    itself = os.path.lexists(path / "run.json")
    below = [] if itself else folders_with(path, "*/run.json")
    if os.path.isdir(path) and os.access(path, os.X_OK) and not below and not itself:
        raise InputError("read run", f"{path} holds no run", "a run's folder, or a device's with its runs in it")
    return below or [path]


def files_beside(target: Path) -> list[Path]:
    """The Parquet files of a profile."""
    tables = json.loads(read_text(target))["tables"]
    return [target.with_name(table["file"]) for table in tables.values() if "file" in table]


def profile_of(paths: list[Path], *, fit: bool) -> Profile:
    """The profile in a file, or the one that runs make (fit: with models fitted to them)."""
    files = [path for path in paths if os.path.lexists(path) and not os.path.isdir(path)]
    if not files:
        return Profile.from_runs([read_one_run(run) for path in paths for run in runs_below(path)], fit=fit)
    if len(paths) > 1:
        raise InputError("profile export", f"{files[0]} beside other paths", "one profile, or folders of runs")
    return Profile.load(files[0])


def degrees(text: str) -> tuple[int, ...]:
    """Tensor-parallel degrees, each once, ascending."""
    found = integers("--tp", text, high=2**16 - 1)
    if not found:
        raise InputError("--tp", repr(text), "degrees of at least 1, comma separated: 1,2,4")
    return tuple(sorted(set(found)))


# --- show and validate -----------------------------------------------------------------------------------------------


@profile.command(short_help="Show a profile's contents and accuracy.")
def show(file: File, as_json: AsJson = False) -> None:
    """Show the device, the measured rows, the accuracy of the models, and the largest cliffs."""
    found = Profile.load(file)
    if as_json:
        print_json(view.profile_to_json(found))
        return
    console = output()
    say(console, device_line(found.device))
    for line in view.origin_lines(found):
        say(console, printable(line))
    table = view.rows_table(found)
    if table is not None:
        console.print()
        console.print(table)
    console.print()
    for line in view.model_lines(found):
        say(console, printable(line))
    cliffs = view.cliffs_table(found)
    if cliffs is not None:
        console.print()
        console.print(cliffs)
    for line in view.finding_lines(found):
        say(console, printable(line))
    say(console, f"\nnext: quantbench profile query {file} --gemm 4096,4096,4096")


@profile.command(short_help="Check that a profile is complete and unchanged.")
def validate(file: File, as_json: AsJson = False) -> None:
    """Check a profile's digest, version, types, and every figure against the hardware's peak."""
    found = Profile.load(file)
    rows = {kind: len(table) for kind, table in found.tables.items()}
    if as_json:
        print_json({"profile": file, "valid": True, "device": found.device.name, "rows": rows})
        return
    listed = ", ".join(f"{count:,} {kind}" for kind, count in rows.items() if count) or "no"
    say(output(), f"{file}: a whole, unchanged profile of {found.device.name} with {listed} rows")


# --- query -----------------------------------------------------------------------------------------------------------


@profile.command(short_help="Look up the time of an operation.")
def query(
    file: File,
    gemm: Annotated[list[str] | None, typer.Option("--gemm", help="m,n,k or m,n,k,batch; may be given often.")] = None,
    softmax: Annotated[list[str] | None, typer.Option("--softmax", help="batch,rows,cols.")] = None,
    attention: Annotated[
        list[str] | None, typer.Option("--attention", help="batch,heads,seq,head_dim or with kv_heads at the end.")
    ] = None,
    collective: Annotated[
        list[str] | None, typer.Option("--collective", help="op,bytes,gpus or op,bytes,gpus,nodes.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Number format (default: the profile's own).")] = "",
    layout: Annotated[str, typer.Option(help="nn, nt or tn (default: the profile's own).")] = "",
    direction: Annotated[str, typer.Option(help="forward or backward.")] = "forward",
    as_json: AsJson = False,
) -> None:
    """The time of a shape with its interval: measured, interpolated between measured shapes, or modelled."""
    asked = {"gemm": gemm, "softmax": softmax, "attention": attention, "collective": collective}
    if not any(asked.values()):
        *others, last = (f"--{kind}" for kind in _QUERIES)
        raise InputError("profile query", "no shape", f"{', '.join(others)} or {last}")
    require_choice("profile query", "--direction", direction, ("forward", "backward"))
    found = Profile.load(file)
    answers = [
        (kind, text, _ask(found, kind, text, dtype or None, layout or None, direction))
        for kind, texts in asked.items()
        for text in texts or ()
    ]
    if as_json:
        fields = ("latency_us", "low_us", "high_us", "source", "bound", "outside", "note")
        listed = [
            {"kind": kind, "shape": _shape(kind, text), **{name: getattr(one, name) for name in fields}}
            for kind, text, one in answers
        ]
        print_json({"device": found.device.name, "answers": listed})
        return
    console = output()
    say(console, device_line(found.device))
    console.print()
    console.print(view.answers_table(answers))


def _ask(profile: Profile, kind: str, text: str, dtype: str | None, layout: str | None, direction: str) -> Estimate:
    one: Estimate | Estimates
    op, sizes = _typed(kind, text)
    if kind == "gemm":
        m, n, k, *batch = sizes
        one = profile.gemm(m, n, k, dtype=dtype, layout=layout, batch=batch[0] if batch else 1)
    elif kind == "softmax":
        mask = "causal" if sizes[1] == sizes[2] else "none"
        one = profile.softmax(*sizes, dtype=dtype, mask=mask, direction=direction)
    elif kind == "attention":
        batch_size, heads, seq, head_dim, *kv_heads = sizes
        kv = kv_heads[0] if kv_heads else 0
        one = profile.attention(batch_size, heads, seq, seq, head_dim, kv, dtype=dtype, direction=direction)
    else:
        message_bytes, num_gpus, *nodes = sizes
        one = profile.collective(op, message_bytes, num_gpus, num_nodes=nodes[0] if nodes else 1, dtype=dtype)
    assert isinstance(one, Estimate)
    return one


def _shape(kind: str, text: str) -> list[str | int]:
    """What was asked for, as JSON has it."""
    op, sizes = _typed(kind, text)
    return [op, *sizes] if op else [*sizes]


def _typed(kind: str, text: str) -> tuple[str, tuple[int, ...]]:
    """(the op of a collective, else "", the sizes)."""
    words, counts = _QUERIES[kind]
    op, parts = "", [part.strip() for part in text.split(",")]
    if kind == "collective":
        op, *parts = parts
    named = bool(_OP.fullmatch(op)) == (kind == "collective")
    if not named or len(parts) not in counts or not all(_DIGITS.fullmatch(part) for part in parts):
        raise InputError(f"--{kind}", repr(text)[:100], words)
    return op, tuple(int(part) for part in parts)


# --- blindspots ------------------------------------------------------------------------------------------------------


@profile.command(short_help="Interpolation error of a planner's table.")
@grouped
def blindspots(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a profile's JSON file.", metavar="RUN")],
    asked: BlindspotOptions,
    as_json: AsJson = False,
) -> None:
    """Interpolation error of a planner between the rows of its table, and the fewest extra measurements that fix it."""
    _require_consistent(asked)
    profile = profile_of([run], fit=False)
    with threadpool_limits(1):
        if asked.held_out:
            _held_out(profile, asked, as_json)
        else:
            _find(run, profile, asked, as_json)


def _require_consistent(asked: BlindspotOptions) -> None:
    _ = asked.share  # refuses what is no percentage
    require_int(BLINDSPOTS, "--rows", asked.rows, low=_FEWEST_MODEL_ROWS, high=_MOST_MODEL_ROWS)
    if asked.docs is not None and not asked.held_out:
        raise InputError(BLINDSPOTS, "--docs without --held-out", "both: the experiment's table is what docs show")
    if asked.shapes is not None and asked.held_out:
        raise InputError(BLINDSPOTS, "--shapes with --held-out", "one of them: held-out rows were measured already")
    require_choice(BLINDSPOTS, "--for", asked.consumer, CONSUMERS)
    require_choice(BLINDSPOTS, "--of", asked.target, TARGETS)
    if asked.shapes is not None:
        check_file(BLINDSPOTS, asked.shapes)
    if asked.docs is not None:
        around_markers(asked.docs, SECTION)


def _find(run: Path, profile: Profile, asked: BlindspotOptions, as_json: bool) -> None:
    consumer, bound, target, shapes = asked.consumer, asked.share, asked.target, asked.shapes
    console = output(stderr=as_json)
    say(console, f"{profile.device.name} as {consumer}'s table; making a model, asking it between the rows")
    # A profile's file carries a model of its rows; of a run one must be made.
    found = find(profile, consumer, bound, target, asked.rows, own_model=os.path.isfile(run))
    if shapes is not None:
        _write_shapes(shapes, found)
    if as_json:
        print_json(found_to_json(found, bound, target, _SHOWN))
        return
    fitted = f"fitted to {found.model_rows:,} rows" if found.model_rows else "of other GPUs"
    places = len(found.choice.before)
    say(console, f"{found.num_rows:,} products of {found.dtype}, {places:,} places between, a model {fitted}")
    say(console, _expected("as it is", found.choice.before))
    for spot in found.spots[:_SHOWN]:
        say(console, f"  {spot_line(spot)}")
    count = len(found.choice.rows)
    if not count:
        say(console, f"nothing to add: the {target} is within {percent(bound)}")
        return
    say(console, _expected(f"with {count:,} more rows", found.choice.after))
    say(console, "expected is not measured: run it again on the rows once they were measured")
    where = shapes or Path("extra.csv")
    if shapes is None:
        say(console, f"next: quantbench profile blindspots {run} --for {consumer} --shapes {where}")
    else:
        say(console, f"next: quantbench sweep --shapes {where}")


def _expected(what: str, errors: FloatArray) -> str:
    parts = ", ".join(f"{name} {percent(value)}" for name, value in summary(errors).items())
    return f"expected error {what}: {parts}"


def _write_shapes(path: Path, found: Blindspots) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("m", "n", "k"))
            writer.writerows(found.choice.rows)
    except OSError as error:
        raise StoreError(BLINDSPOTS, f"{path} ({error.strerror})", "a file that can be written") from None


def _held_out(profile: Profile, asked: BlindspotOptions, as_json: bool) -> None:
    console = output(stderr=as_json)
    table, dtype = measured_products(profile, asked.consumer)
    ask, who = consumer_of(profile.device.name, dtype)
    found = replay(table, thin_model(profile, table, dtype, asked.rows), ask, asked.share, asked.target)
    sources = [run.source or run.run_id for run in profile.provenance.runs]
    origins = [f"{profile.device.name}: {found.total_rows:,} products of {dtype} from {'; '.join(sources)}"]
    if asked.docs is not None:
        write_between(asked.docs, SECTION, replay_markdown(found, who, origins))
    if as_json:
        print_json(replay_to_json(found, who))
        return
    say(console, f"{origins[0]}, interpolated by {who}")
    say(console, "errors: median / p95 of |interpolated / measured - 1|, in %")
    columns = replay_columns(found.lines[0])
    shown = plain_table(*columns, right=columns[1:])
    for line in found.lines:
        shown.add_row(*replay_cells(line))
    console.print(shown)
    if asked.docs is not None:
        say(console, f"written into {asked.docs}")
