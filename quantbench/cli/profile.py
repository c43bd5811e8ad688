"""Command `profile`: makes, shows, queries and exports profiles of GPUs, which planners load."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quantbench.cli.devices import device_line
from quantbench.cli.options import argument, command, integers, json_option, option
from quantbench.cli.output import check_file, check_folder, output, print_result, say
from quantbench.errors import InputError, printable, require_choice
from quantbench.files import folders_with, read_text, write_file
from quantbench.latency.libraries import LIBRARIES, library_of
from quantbench.units import counted, percent

if TYPE_CHECKING:
    from quantbench.profile import Estimate, Profile
    from quantbench.profile.exporters.options import ExportOptions
    from quantbench.profile.linear_interpolation import FloatArray
    from quantbench.store.folder import Run

# Seconds of an export on one core of a 2024 server. Fitting takes as long for 800 rows as for
# 8,000; finding cliffs takes time proportional to the records. By whether models are fitted:
_FIXED_S = {True: 15.0, False: 4.0}
_PER_RECORD_S = 3e-4
_MOST_SPOTS = 10  # that are shown
# Longer numbers are no sizes, and int() refuses very long ones.
_DIGITS = re.compile("[0-9]{1,19}")
_OP = re.compile("[a-z_]{1,20}")
# By kind: what to type, and the possible numbers of sizes.
_QUERIES = {
    "gemm": ("m,n,k or m,n,k,batch", (3, 4)),
    "softmax": ("batch,rows,cols", (3,)),
    "attention": ("batch,heads,seq,head_dim or batch,heads,seq,head_dim,kv_heads", (4, 5)),
    "collective": ("op,bytes,gpus or op,bytes,gpus,nodes, such as all_reduce,67108864,8", (2, 3)),
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
    """Options of the planners' formats."""

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
        from quantbench.profile.exporters.options import ExportOptions

        return ExportOptions(
            provider=self.provider,
            dtype=self.dtype,
            layout=self.layout,
            backend=self.backend,
            version=self.version,
            model=self.model,
            configs=tuple(self.config or ()),
            tensor_parallel=degrees(self.tp) if self.tp else (),
            grid=self.grid,
            library=library,
        )


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
        f"Only rows (with --gpu: models) of this library: {', '.join(LIBRARIES)} (default: all).",
    ),
    as_json: bool = json_option(),
) -> None:
    """Write the tables, fitted models, cliffs and rule verdicts of a device's runs to one file, or
    convert runs or a profile to a planner's format."""
    if bool(runs) == bool(gpu):
        raise InputError("profile export", "runs and --gpu" if gpu else "no runs", "one of them")
    from quantbench.profile.exporters import FORMATS

    if to == "profile":
        if planner != PlannerOptions() or gpu:
            what = f"--gpu {gpu}" if gpu else "a planner's option"
            formats = ", ".join(FORMATS)
            raise InputError("profile export", f"{what} without --format", f"one of {formats}")
        _export_profile(runs or [], target, fit, library, as_json)
        return
    from quantbench.profile.exporters.options import WHO

    folder = target or Path(to)
    require_choice(WHO, "--format", to, FORMATS)
    check_folder(WHO, folder)
    if gpu:
        from quantbench.device import lookup
        from quantbench.profile import Profile

        made = Profile.shipped(lookup(gpu))
    else:
        made = profile_of(runs or [], fit=fit, library=library)
    _export_format(made, to, folder, planner.options(library if gpu else ""), as_json)


def _export_profile(
    paths: list[Path], target_file: Path | None, fit: bool, library: str, as_json: bool
) -> None:
    """Makes a profile of runs and writes it, by default to profile.json in the device's folder,
    else here.
    """
    from quantbench.analysis.summary import rejected_lines
    from quantbench.cli import profile_print as view
    from quantbench.profile import Profile
    from quantbench.store.folder import read_one_run

    runs = of_library([read_one_run(run) for path in paths for run in runs_below(path)], library)
    a_device = len(paths) == 1 and runs_below(paths[0]) != paths
    target = target_file or (paths[0] / "profile.json" if a_device else Path("profile.json"))
    check_file("profile export", target)
    records = sum(len(run.records) for run in runs)
    fits = fit and runs[0].info.device.kind != "cpu"  # processors have no model
    duration = f"{_FIXED_S[fits] + records * _PER_RECORD_S:.0f} s"
    say(
        output(stderr=True),
        f"{counted(records, 'record')}: cliffs, rules and models take about {duration}",
    )
    made = Profile.from_runs(runs, fit=fit)
    made.save(target)
    tables = json.loads(read_text(target))["tables"].values()
    beside = "".join(f", {table['file']}" for table in tables if "file" in table)
    left_out = rejected_lines(record for run in runs for record in run.records)
    about = map(
        printable,
        (*view.origin_lines(made), view.rows_line(made), *left_out, *view.model_lines(made)),
    )
    written = (f"\nwritten: {target}{beside}", f"next: quantbench profile show {target}")
    lines = (device_line(made.device), *about, *written)
    print_result(
        as_json,
        lambda: {"profile": target, "left_out": left_out, **view.profile_to_json(made)},
        lines,
    )


def _export_format(
    profile: Profile, name: str, folder: Path, options: ExportOptions, as_json: bool
) -> None:
    """Writes a profile in a planner's format."""
    from quantbench.profile.exporters import export_profile

    made = export_profile(profile, name, folder, options)
    answer = {
        "format": name,
        "folder": folder,
        "paths": made.paths,
        "rows": made.rows,
        "left_out": made.left_out,
        "notes": made.notes,
        "use": made.use,
    }
    counts = ", ".join(f"{count:,} {kind}" for kind, count in made.rows.items())
    left_out = [
        f"  {count:,} rows left out: {reason}" for reason, count in made.left_out.most_common()
    ]
    notes, use = (f"  {note}" for note in made.notes), (f"use: {line}" for line in made.use)
    print_result(as_json, lambda: answer, (f"{folder}: {counts}", *left_out, *notes, *use))


def runs_below(path: Path) -> list[Path]:
    """Returns a run's folder itself, or the runs in a device's folder. Raises InputError if there
    is none.
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


def of_library(runs: list[Run], library: str) -> list[Run]:
    """Keeps the records of a library ("": all), and collectives. Raises InputError if no other
    record is left.
    """
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
        raise InputError(
            "profile export", f"--library {library}", "one of " + ", ".join(sorted(found))
        )

    kept = (
        [
            one
            for one in run.records
            if one.workload.kind == "collective" or library_of(one.provider) == library
        ]
        for run in runs
    )
    return [
        replace(run, records=tuple(records))
        for run, records in zip(runs, kept, strict=True)
        if records
    ]


def profile_of(paths: list[Path], *, fit: bool, library: str = "") -> Profile:
    """Loads a profile, or makes one of runs. fit: whether to fit models to their rows. library: as
    in `of_library`.
    """
    from quantbench.profile import Profile
    from quantbench.store.folder import read_one_run

    paths = [_profile_in(path) for path in paths]
    files = [path for path in paths if os.path.lexists(path) and not os.path.isdir(path)]
    if not files:
        runs = [read_one_run(run) for path in paths for run in runs_below(path)]
        return Profile.from_runs(of_library(runs, library), fit=fit)
    if library:
        raise InputError(
            "profile export", f"--library {library} with {files[0]}", "runs, or --provider"
        )
    if len(paths) > 1:
        raise InputError(
            "profile export", f"{files[0]} beside other paths", "one profile, or folders of runs"
        )
    return Profile.load(files[0])


def _profile_in(path: Path) -> Path:
    """Returns the profile in a device's folder without runs, else `path` itself."""
    file = path / "profile.json"
    has_runs = os.path.lexists(path / "run.json") or folders_with(path, "*/run.json")
    return file if os.path.isfile(file) and not has_runs else path


def degrees(text: str) -> tuple[int, ...]:
    """Parses tensor-parallel degrees; returns each once, ascending. Raises InputError for none."""
    found = integers("--tp", text, high=2**16 - 1)
    if not found:
        raise InputError("--tp", repr(text), "degrees of at least 1, comma separated: 1,2,4")
    return tuple(sorted(set(found)))


# --- show -----------------------------------------------------------------------------------------


@profile.command("show", short_help="Check a profile, and show its contents and accuracy.")
@command
def show_profile(file: Path = _FILE, as_json: bool = json_option()) -> None:
    """Check that a profile is whole and unchanged, and show the device, the measured rows, the
    accuracy of the models and the largest cliffs."""
    from quantbench.cli import profile_print as view
    from quantbench.profile import Profile

    found = Profile.load(file)
    lines = (
        *view.profile_lines(found),
        f"\nnext: quantbench profile query {file} --gemm 4096,4096,4096",
    )
    print_result(as_json, lambda: view.profile_to_json(found), lines)


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
    as_json: bool = json_option(),
) -> None:
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
    for word, given, kinds in (
        (f"--layout {layout}", layout, ("gemm",)),
        (f"--direction {direction}", direction != "forward", ("softmax", "attention")),
    ):
        if given and not any(asked[kind] for kind in kinds):
            raise InputError(
                "profile query",
                f"{word} without effect",
                " or ".join(f"--{kind}" for kind in kinds),
            )
    found = Profile.load(file)
    asked_for = [
        (kind, text, *_typed(kind, text)) for kind, texts in asked.items() for text in texts or ()
    ]
    answers = [
        _ask(found, kind, op, sizes, dtype, layout, direction, library or None)
        for kind, _, op, sizes in asked_for
    ]
    fields = ("format", "latency_us", "low_us", "high_us", "source", "bound", "outside", "note")
    listed = [
        {
            "kind": kind,
            "shape": [op, *sizes] if op else sizes,
            **{name: getattr(one, name) for name in fields},
        }
        for (kind, _, op, sizes), one in zip(asked_for, answers, strict=True)
    ]
    table = answers_table((f"{kind} {text}" for kind, text, _, _ in asked_for), answers)
    answer = {"device": found.device.name, "answers": listed}
    print_result(as_json, lambda: answer, (device_line(found.device), "", table))


def _ask(
    profile: Profile,
    kind: str,
    op: str,
    sizes: list[int],
    dtype: str,
    layout: str,
    direction: str,
    library: str | None,
) -> Estimate:
    """Queries the time of one shape. sizes: as in _QUERIES; op: name of the collective."""
    given: dict[str, Any] = {"dtype": dtype or None, "provider": library}
    one: Any  # an Estimate, as one shape is asked about and not arrays of them
    if kind == "gemm":
        m, n, k, batch = (*sizes, 1)[:4]
        one = profile.gemm(m, n, k, layout=layout or None, batch=batch, **given)
    elif kind == "softmax":
        mask = "causal" if sizes[1] == sizes[2] else "none"
        one = profile.softmax(*sizes, mask=mask, direction=direction, **given)
    elif kind == "attention":
        batch, heads, seq, head_dim, kv_heads = (*sizes, 0)[:5]
        one = profile.attention(
            batch, heads, seq, seq, head_dim, kv_heads, direction=direction, **given
        )
    else:
        message_bytes, num_gpus, num_nodes = (*sizes, 1)[:3]
        one = profile.collective(op, message_bytes, num_gpus, num_nodes=num_nodes, **given)
    return one  # type: ignore[no-any-return]


def _typed(kind: str, text: str) -> tuple[str, list[int]]:
    """Parses a shape to (the op of a collective, else ""; the sizes)."""
    words, counts = _QUERIES[kind]
    op, parts = "", [part.strip() for part in text.split(",")]
    if kind == "collective":
        op, *parts = parts
    named = bool(_OP.fullmatch(op)) == (kind == "collective")
    if not named or len(parts) not in counts or not all(_DIGITS.fullmatch(part) for part in parts):
        raise InputError(f"--{kind}", repr(text)[:100], words)
    return op, [int(part) for part in parts]


# --- blindspots -----------------------------------------------------------------------------------


@profile.command(short_help="Sizes that linear interpolation between measured products misses.")
@command
def blindspots(
    *,
    path: Path = argument(
        "A profile's JSON file, or a run's folder (then a model is fitted).", metavar="PROFILE"
    ),
    shapes: Path | None = option(None, "CSV file for the points to measure, for `sweep --shapes`."),
    as_json: bool = json_option(),
) -> None:
    """Find the sizes between measured products that a planner's linear interpolation misses by
    most, and the fewest points that keep its error within 5 %."""
    from threadpoolctl import threadpool_limits  # comes with scikit-learn, which needs it

    from quantbench.cli import profile_print as view
    from quantbench.profile.blindspots import find
    from quantbench.profile.linear_interpolation import BOUND

    def expected(what: str, errors: FloatArray) -> str:
        parts = ", ".join(
            f"{name} {percent(value)}" for name, value in view.error_summary(errors).items()
        )
        return f"expected error {what}: {parts}"

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
    print_result(as_json, lambda: view.blindspots_to_json(found, _MOST_SPOTS), lines)
