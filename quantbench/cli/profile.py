"""Command `profile`: makes, shows, queries and exports GPU profiles, which planners load.

A profile is one file with a GPU's measured tables, fitted models and cliffs. `blindspots` finds
sizes at which linear interpolation between the profile's rows is wrong.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quantbench.cli.devices import device_line
from quantbench.cli.options import argument, command, integers, option
from quantbench.cli.output import Lines, Result, check_file, check_folder, encoded, output, say
from quantbench.errors import InputError, printable, require_choice
from quantbench.files import folders_with, read_text, write_file
from quantbench.latency.libraries import LIBRARIES, library_of
from quantbench.units import counted, listed, percent

if TYPE_CHECKING:
    from quantbench.profile import Estimate, Profile
    from quantbench.profile.exporters.options import ExportOptions
    from quantbench.profile.linear_interpolation import FloatArray
    from quantbench.store.folder import Run
    from quantbench.store.record import Record

# Expected duration of an export, in s on one core of a 2024 server, which is printed before the
# export starts. _FIXED_S, by whether models are fitted: a fit takes as long for 800 rows as for
# 8,000. _PER_RECORD_S: time to find cliffs, proportional to the number of records.
_FIXED_S = {True: 15.0, False: 4.0}
_PER_RECORD_S = 3e-4
_MOST_SPOTS = 10  # maximum number of blind spots in the output
_MOST_OTHERS = 5  # maximum number of other files that are named
# Text of a size. The number of digits is limited, because int() raises an error for very long
# numbers.
_DIGITS = re.compile("[0-9]{1,19}")
_OP = re.compile("[a-z_]{1,20}")
# Names of the numbers that describe a shape of each kind: (required, optional).
_QUERIES = {
    "gemm": ("m,n,k", "batch"),
    "softmax": ("batch,rows,cols", ""),
    "attention": ("batch,heads,seq,head_dim", "kv_heads"),
    "collective": ("op,bytes,gpus", "nodes"),
}
_FILE = argument("A profile's JSON file.", metavar="FILE")

profile = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Make, read and export a GPU's tables, models and cliffs as one file.",
)


# --- export ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """Options of `profile export` for the planners' formats."""

    provider: str = option("", "Export only this provider's rows (planner formats).")
    dtype: str = option("", "Export only this number format (planner formats).")
    layout: str = option("", "Export only products of this layout: nt, nn or tn (planner formats).")
    backend: str = option("vllm", "aiconfigurator: vllm, sglang or trtllm.")
    version: str = option(
        "quantbench", "aiconfigurator: version under which it finds the table.", "--as-version"
    )
    model: str = option(
        "", "Models whose shapes are exported, comma separated; vidur: one (llama-3-8b, …)."
    )
    config: list[Path] | None = option(None, "config.json of a further model; may be given often.")
    tp: str = option("", "Tensor-parallel degrees (default: 1 to 16; vidur: 1).")
    grid: Path | None = option(None, "csv, parquet with --gpu: CSV of products m, n, k to model.")

    def options(self, library: str) -> ExportOptions:
        """Converts the typed options to the exporters' options.

        library: library whose models fill the tables; "" for the default library, or if the rows
            were measured.
        """
        from quantbench.profile.exporters.options import ExportOptions

        typed = dict(vars(self))
        typed["configs"] = tuple(typed.pop("config") or ())
        typed["model"] = ",".join(name.strip() for name in self.model.split(","))
        tp = typed.pop("tp")
        named = self.model or self.config
        if tp and not named:
            raise InputError("profile export", f"--tp {tp} without effect", "--model or --config")
        if self.grid is not None and named:
            what = f"--grid {self.grid} with --model or --config"
            raise InputError("profile export", what, "one of them")
        if tp:
            typed["tensor_parallel"] = degrees(tp)
        return ExportOptions(**typed, library=library)


@profile.command(short_help="Make a profile or a planner's files from runs.")
@command
def export(
    *,
    runs: list[Path] | None = argument(
        "Folders of runs of one device, the device's own folder, or a profile.",
        metavar="[RUN…]",
        default=None,
    ),
    gpu: str = option("", "Instead of runs: a GPU, of which the shipped models fill the tables."),
    planner: PlannerOptions,
    target: Path | None = option(
        None, "File (of other formats: folder) to write.", "--output", "-o"
    ),
    to: str = option(
        "profile",
        "profile; or for a planner: aiconfigurator, vidur, llm-analysis, calculon, csv, parquet.",
        "--format",
    ),
    fit: bool = option(True, "Fit models to the rows (otherwise use shipped models)."),
    library: str = option(
        "",
        f"Only rows of this library: {', '.join(LIBRARIES)} (default: all). With --gpu: whose "
        "models (default: the backend's).",
    ),
) -> Result:
    """Write the tables, fitted models, cliffs and rule verdicts of a device's runs to one file, or
    convert runs or a profile to a planner's format."""
    if bool(runs) == bool(gpu):
        given = "runs and --gpu" if gpu else "neither runs nor --gpu"
        raise InputError("profile export", given, "one of them")
    from quantbench.profile.exporters import FORMATS

    if to == "profile":
        if planner != PlannerOptions() or gpu:
            what = f"--gpu {gpu}" if gpu else "a planner's option"
            formats = ", ".join(FORMATS)
            raise InputError("profile export", f"{what} without --format", f"one of {formats}")
        return _export_profile(runs or [], target, fit, library)
    from quantbench.profile.exporters.options import WHO

    folder = target or Path(to)
    require_choice(WHO, "--format", to, FORMATS)
    if folder.suffix in (".csv", ".json", ".parquet") and not folder.is_dir():
        raise InputError(WHO, f"--output {folder}", "the name of a folder")
    check_folder(WHO, folder)
    if gpu:
        from quantbench.device import lookup
        from quantbench.profile import Profile

        made = Profile.shipped(lookup(gpu))
    else:
        made = profile_of(runs or [], fit=fit, library=library)
    return _export_format(made, to, folder, planner.options(library if gpu else ""))


def _export_profile(paths: list[Path], target_file: Path | None, fit: bool, library: str) -> Result:
    """Makes a profile from runs and writes it to a file.

    paths: folders of runs, or the folder of one device.
    target_file: file to write; by default profile.json. The default is in the device's folder if
        that folder is the only path, and otherwise in the current folder.
    fit: whether to fit models to the rows.
    library: library whose rows are kept; "" for all libraries.
    """
    from quantbench.analysis.summary import rejected_lines
    from quantbench.cli import profile_print as view
    from quantbench.profile import Profile

    runs = _runs(paths, library)
    a_device = len(paths) == 1 and runs_below(paths[0]) != paths
    target = target_file or (paths[0] / "profile.json" if a_device else Path("profile.json"))
    check_file("profile export", target)
    records = [record for run in runs for record in run.records]
    fits = fit and runs[0].info.device.kind != "cpu"  # processors have no model
    seconds = _FIXED_S[fits] + len(records) * _PER_RECORD_S
    about = f"cliffs, rules and models take about {seconds:.0f} s"
    say(output(stderr=True), f"{counted(len(records), 'record')}: {about}")
    made = Profile.from_runs(runs, fit=fit)
    made.save(target)
    written = f"\nwritten: {target}"
    for table in json.loads(read_text(target))["tables"].values():
        if "file" in table:
            written += f", {table['file']}"
    left_out = rejected_lines(records)

    def lines() -> Lines:
        yield device_line(made.device)
        yield from map(printable, view.origin_lines(made))
        yield printable(view.rows_line(made))
        yield from map(printable, (*left_out, *view.model_lines(made)))
        yield written
        yield f"next: quantbench profile show {target}"

    answer = {"profile": target, "left_out": left_out, **view.profile_to_json(made)}
    return Result(answer, lines())


def _export_format(profile: Profile, name: str, folder: Path, options: ExportOptions) -> Result:
    """Writes a profile in a planner's format.

    name: name of the format.
    folder: folder to write; for some formats a file.
    """
    from quantbench.profile.exporters import export_profile

    made = export_profile(profile, name, folder, options)
    counts = ", ".join(f"{count:,} {kind}" for kind, count in made.rows.items())
    lines = [f"{folder}: {counts}"]
    others = _other_tables(made.paths)
    if others:
        names = listed(others, _MOST_OTHERS)
        lines.append(f"  other files in {folder} are not of this export: {names}")
    for reason, count in made.left_out.most_common():
        lines.append(f"  {count:,} rows left out: {reason}")
    for note in made.notes:
        lines.append(f"  {note}")
    for line in made.use:
        lines.append(f"use: {line}")
    return Result({"format": name, **encoded(made)}, lines)


def _other_tables(written: list[Path]) -> list[str]:
    """Returns the names of other CSV and Parquet files beside the written ones."""
    found: set[Path] = set()
    for path in written:
        if path.suffix in (".csv", ".parquet", ".xz"):
            found.update(path.parent.glob(f"*{path.suffix}"))
    return sorted(path.name for path in found - set(written))


def runs_below(path: Path) -> list[Path]:
    """Returns the run folders at a path.

    The list has only `path` if this is a run folder, and all run folders below `path` if this is a
    device's folder.

    Raises InputError if `path` is a file or a folder without runs.
    """
    if os.path.isfile(path):
        raise InputError(
            "read run", f"{path} is a file", "folders of runs, or --format with a profile's file"
        )
    itself = os.path.lexists(path / "run.json")
    below = [] if itself else folders_with(path, "*/run.json")
    if os.path.isdir(path) and os.access(path, os.X_OK) and not below and not itself:
        raise InputError(
            "read run", f"{path} holds no run", "a run's folder, or a device's with its runs in it"
        )
    return below or [path]


def _runs(paths: list[Path], library: str) -> list[Run]:
    """Reads the runs from run folders or device folders.

    library: library whose records are kept; "" for all records. Records of collectives are always
        kept.

    Raises InputError if no record is from the library.
    """
    from quantbench.store.folder import read_one_run

    runs = [read_one_run(run) for path in paths for run in runs_below(path)]
    if not library:
        return runs
    require_choice("profile export", "--library", library, LIBRARIES)
    found = {
        library_of(one.provider)
        for run in runs
        for one in run.records
        if one.workload.kind != "collective"
    }
    if library not in found:
        known = "one of " + ", ".join(sorted(found))
        raise InputError("profile export", f"--library {library}", known)

    def wanted(record: Record) -> bool:
        return record.workload.kind == "collective" or library_of(record.provider) == library

    kept = []
    for run in runs:
        records = tuple(filter(wanted, run.records))
        if records:
            kept.append(replace(run, records=records))
    return kept


def profile_of(paths: list[Path], *, fit: bool, library: str = "") -> Profile:
    """Loads a profile, or makes one from runs.

    paths: one profile file, one folder with a profile.json but without runs, or folders of runs or
        devices.
    fit: whether to fit models to the runs' rows.
    library: library whose records are kept; "" for all, and for a profile file.

    Raises InputError if a profile file is combined with other paths or with a library.
    """
    from quantbench.profile import Profile

    paths = [_profile_in(path) for path in paths]
    files = [path for path in paths if os.path.lexists(path) and not os.path.isdir(path)]
    if not files:
        return Profile.from_runs(_runs(paths, library), fit=fit)
    if library:
        raise InputError(
            "profile export", f"--library {library} with {files[0]}", "runs, or --provider"
        )
    if files[0].suffix != ".json" and os.path.exists(files[0]):
        expected = "a profile (.json) or a run's folder; quantbench import csv makes a run of a CSV"
        raise InputError("profile export", str(files[0]), expected)
    if len(paths) > 1:
        raise InputError(
            "profile export", f"{files[0]} beside other paths", "one profile, or folders of runs"
        )
    return Profile.load(files[0])


def _profile_in(path: Path) -> Path:
    """Returns the profile.json in a folder without runs; `path` itself in all other cases."""
    file = path / "profile.json"
    has_runs = os.path.lexists(path / "run.json") or folders_with(path, "*/run.json")
    return file if os.path.isfile(file) and not has_runs else path


def degrees(text: str) -> tuple[int, ...]:
    """Parses tensor-parallel degrees to distinct integers in ascending order.

    text: degrees, comma separated.

    Raises InputError if there is no degree.
    """
    found = integers("--tp", text, high=2**16 - 1)
    if not found:
        raise InputError("--tp", repr(text), "degrees of at least 1, comma separated: 1,2,4")
    return tuple(sorted(set(found)))


# --- show -----------------------------------------------------------------------------------------


@profile.command("show", short_help="Check a profile, and show its contents and accuracy.")
@command
def show_profile(file: Path = _FILE) -> Result:
    """Check that a profile is whole and unchanged, and show the device, the measured rows, the
    accuracy of the models and the largest cliffs."""
    from quantbench.cli import profile_print as view
    from quantbench.profile import Profile

    found = Profile.load(file)
    next_line = f"\nnext: quantbench profile query {file} --gemm 4096,4096,4096"
    return Result(view.profile_to_json(found), chain(view.profile_lines(found), [next_line]))


# --- query ----------------------------------------------------------------------------------------


@profile.command(short_help="Look up the time of an operation.")
@command
def query(
    file: Path = _FILE,
    gemm: list[str] | None = option(None, "m,n,k or m,n,k,batch; may be given often."),
    softmax: list[str] | None = option(None, "batch,rows,cols."),
    attention: list[str] | None = option(
        None, "batch,heads,seq,head_dim or with kv_heads at the end."
    ),
    collective: list[str] | None = option(None, "op,bytes,gpus or op,bytes,gpus,nodes."),
    dtype: str = option("", "Number format (default: the profile's own)."),
    layout: str = option("", "nn, nt or tn (default: the profile's own)."),
    library: str = option("", "Whose rows: vllm, torch, … (default: those with the most rows)."),
    direction: str = option("forward", "forward or backward."),
) -> Result:
    """Look up the time of a shape with its interval: measured, interpolated between measured
    shapes, or modelled.
    """
    from quantbench.cli.profile_print import answers_table
    from quantbench.profile import Profile

    asked = {"gemm": gemm, "softmax": softmax, "attention": attention, "collective": collective}
    if not any(asked.values()):
        *others, last = (f"--{kind}" for kind in _QUERIES)
        raise InputError("profile query", "no shape", f"{', '.join(others)} or {last}")
    require_choice("profile query", "--direction", direction, ("forward", "backward"))
    if layout and not gemm:
        raise InputError("profile query", f"--layout {layout} without effect", "--gemm")
    if direction != "forward" and not (softmax or attention):
        typed = f"--direction {direction} without effect"
        raise InputError("profile query", typed, "--softmax or --attention")
    found = Profile.load(file)
    of_rows: dict[str, Any] = {"dtype": dtype or None, "provider": library or None}
    fields = ("format", "latency_us", "low_us", "high_us", "source", "bound", "outside", "note")
    answers = []
    listed = []
    for kind, texts in asked.items():
        for text in texts or ():
            sizes = _typed(kind, text)
            one = _ask(found, kind, sizes, layout or None, direction, of_rows)
            answers.append((f"{kind} {text}", one))
            times = {name: getattr(one, name) for name in fields}
            listed.append({"kind": kind, "shape": list(sizes.values()), **times})
    answer = {"device": found.device.name, "answers": listed}
    return Result(answer, (device_line(found.device), "", answers_table(answers)))


def _ask(
    profile: Profile,
    kind: str,
    sizes: dict[str, Any],
    layout: str | None,
    direction: str,
    of_rows: dict[str, Any],
) -> Estimate:
    """Queries a profile for the time of one shape.

    kind: key of _QUERIES.
    sizes: values that describe the shape, by the names in _QUERIES.
    layout: memory layout of a GEMM; None for the profile's usual layout.
    direction: forward or backward, for softmax and attention.
    of_rows: arguments that select the rows: dtype and provider.
    """
    one: Any  # an Estimate, because the sizes are numbers and not arrays
    if kind == "gemm":
        one = profile.gemm(**sizes, layout=layout, **of_rows)
    elif kind == "softmax":
        mask = "causal" if sizes["rows"] == sizes["cols"] else "none"
        one = profile.softmax(**sizes, mask=mask, direction=direction, **of_rows)
    elif kind == "attention":
        batch, heads, seq, *others = sizes.values()
        one = profile.attention(batch, heads, seq, seq, *others, direction=direction, **of_rows)
    else:
        op, *numbers = sizes.values()
        one = profile.collective(op, *numbers[:2], num_nodes=sizes.get("nodes", 1), **of_rows)
    return one  # type: ignore[no-any-return]


def _typed(kind: str, text: str) -> dict[str, Any]:
    """Parses the values that describe a shape, and returns them by the names in _QUERIES.

    All values are integers, except the name of a collective's operation.

    Raises InputError if values are missing or malformed.
    """
    needed, optional = _QUERIES[kind]
    names = needed.split(",")
    parts = [part.strip() for part in text.split(",")]
    expected = needed
    if optional:
        expected += f" or {needed},{optional}"
    if optional and len(parts) > len(names):
        names.append(optional)
    if kind == "collective":
        expected += ", such as all_reduce,67108864,8"
    found: dict[str, Any] = dict(zip(names, parts, strict=False))
    right = len(parts) == len(names)
    for name, part in found.items():
        if name == "op":
            right = right and bool(_OP.fullmatch(part))
        elif _DIGITS.fullmatch(part):
            found[name] = int(part)
        else:
            right = False
    if not right:
        raise InputError(f"--{kind}", repr(text)[:100], expected)
    return found


# --- blindspots -----------------------------------------------------------------------------------


@profile.command(short_help="Sizes that linear interpolation between measured products misses.")
@command
def blindspots(
    *,
    path: Path = argument(
        "A profile's JSON file, or a run's folder (then a model is fitted).", metavar="PROFILE"
    ),
    shapes: Path | None = option(None, "CSV file for the points to measure, for `sweep --shapes`."),
) -> Result:
    """Find the sizes between measured products that a planner's linear interpolation misses by
    most, and the fewest points that keep its error within 5 %."""
    from threadpoolctl import threadpool_limits  # a dependency of scikit-learn

    from quantbench.cli import profile_print as view
    from quantbench.profile.blindspots import find
    from quantbench.profile.linear_interpolation import BOUND

    def expected(what: str, errors: FloatArray) -> str:
        parts = [f"{name} {percent(value)}" for name, value in view.error_summary(errors).items()]
        return f"expected error {what}: {', '.join(parts)}"

    if shapes is not None:
        check_file("profile blindspots", shapes)
    with threadpool_limits(1):
        found = find(profile_of([path], fit=True))
    if shapes is not None:
        rows = [",".join(map(str, row)) for row in (("m", "n", "k"), *found.add)]
        write_file("profile blindspots", shapes, "\n".join(rows) + "\n")
    lines = [
        f"{found.num_rows:,} products of {found.dtype}, {len(found.before):,} places between; "
        f"{found.note}",
        expected("as it is", found.before),
        *(f"  {view.spot_line(spot)}" for spot in found.spots[:_MOST_SPOTS]),
    ]
    if found.add:
        lines.append(expected(f"with {len(found.add):,} more rows", found.after))
        lines.append("expected is not measured: run it again on the rows once they were measured")
        again = f"profile blindspots {path} --shapes extra.csv"
        lines.append(f"next: quantbench {again if shapes is None else f'sweep --shapes {shapes}'}")
    else:
        lines.append(f"nothing to add: every error is within {percent(BOUND)}")
    return Result(view.blindspots_to_json(found, _MOST_SPOTS), lines)
