"""What the commands of `quantbench profile` do."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape

from quantbench.cli import profile_print as view
from quantbench.cli.console import output, say
from quantbench.cli.devices import device_line
from quantbench.cli.writable import check_file
from quantbench.errors import InputError, require_choice
from quantbench.profile import Estimate, Estimates, Profile
from quantbench.report.source import read_one_run
from quantbench.report.words import printable

# On one core of a 2024 server: fitting takes as long for 800 rows as for 8,000, cliffs as long as there are records.
_FIXED_S = {True: 15.0, False: 4.0}
_PER_RECORD_S = 3e-4

# Longer ones are no sizes, and int() refuses the very long.
_DIGITS = re.compile("[0-9]{1,19}")

_QUERIES = {
    "gemm": ("m,n,k or m,n,k,batch", (3, 4)),
    "softmax": ("batch,rows,cols", (3,)),
    "attention": ("batch,heads,seq,head_dim or batch,heads,seq,head_dim,kv_heads", (4, 5)),
}


def export_profile(paths: list[Path], output_file: Path | None, fit: bool, as_json: bool) -> None:
    """Make a profile of runs and write it: without a name, as profile.json beside a device's runs, or here."""
    runs = [read_one_run(run) for path in paths for run in runs_below(path)]
    a_device = len(paths) == 1 and runs_below(paths[0]) != paths
    target = output_file or (paths[0] / "profile.json" if a_device else Path("profile.json"))
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
        print(json.dumps({"profile": str(target), **view.profile_to_json(made)}, indent=1, allow_nan=False))
        return
    console = output()
    say(console, escape(device_line(made.device)))
    for line in (*view.origin_lines(made), *view.rows_lines(made), *view.model_lines(made)):
        say(console, escape(printable(line)))
    say(console, escape(f"\nwritten: {target}" + "".join(f", {beside.name}" for beside in files_beside(target))))
    say(console, escape(f"next: quantbench profile show {target}"))


def runs_below(path: Path) -> list[Path]:
    """A run's folder itself, or the runs in a device's folder. Raises InputError where there is none."""
    if path.is_file():
        raise InputError("read run", f"{path} is a file", "folders of runs, or --format with a profile's file")
    below = [] if (path / "run.json").exists() else sorted(found.parent for found in path.glob("*/run.json"))
    if path.is_dir() and not below and not (path / "run.json").exists():
        raise InputError("read run", f"{path} holds no run", "a run's folder, or a device's with its runs in it")
    return below or [path]


def files_beside(target: Path) -> list[Path]:
    """The Parquet files of a profile."""
    tables = json.loads(target.read_text(encoding="utf-8"))["tables"]
    return [target.with_name(table["file"]) for table in tables.values() if "file" in table]


def show_profile(file: Path, as_json: bool) -> None:
    """What is in a profile."""
    found = Profile.load(file)
    if as_json:
        print(json.dumps(view.profile_to_json(found), indent=1, allow_nan=False))
        return
    console = output()
    say(console, escape(device_line(found.device)))
    for line in view.origin_lines(found):
        say(console, escape(printable(line)))
    table = view.rows_table(found)
    if table is not None:
        console.print()
        console.print(table)
    console.print()
    for line in view.model_lines(found):
        say(console, escape(printable(line)))
    cliffs = view.cliffs_table(found)
    if cliffs is not None:
        console.print()
        console.print(cliffs)
    for line in view.finding_lines(found):
        say(console, escape(printable(line)))
    say(console, escape(f"\nnext: quantbench profile query {file} --gemm 4096,4096,4096"))


def validate_profile(file: Path, as_json: bool) -> None:
    """Load a profile, which checks all of it, and ask it once."""
    found = Profile.load(file)
    rows = {kind: len(table) for kind, table in found.tables.items()}
    if as_json:
        print(json.dumps({"profile": str(file), "valid": True, "device": found.device.name, "rows": rows}, indent=1))
        return
    listed = ", ".join(f"{count:,} {kind}" for kind, count in rows.items() if count) or "no"
    say(output(), escape(f"{file}: a whole, unchanged profile of {found.device.name} with {listed} rows"))


def query_profile(
    file: Path, gemm: list[str], softmax: list[str], attention: list[str], dtype: str, layout: str, direction: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Ask a profile for shapes."""
    asked = [("gemm", text) for text in gemm] + [("softmax", text) for text in softmax]
    asked += [("attention", text) for text in attention]
    if not asked:
        raise InputError("profile query", "no shape", "--gemm, --softmax or --attention")
    require_choice("profile query", "--direction", direction, ("forward", "backward"))
    found = Profile.load(file)
    answers = [(kind, text, _ask(found, kind, _whole(kind, text), dtype or None, layout or None, direction))
               for kind, text in asked]  # fmt: skip
    if as_json:
        listed = [{"kind": kind, "shape": list(_whole(kind, text)), **asdict(one)} for kind, text, one in answers]
        print(json.dumps({"device": found.device.name, "answers": listed}, indent=1, allow_nan=False))
        return
    console = output()
    say(console, escape(device_line(found.device)))
    console.print()
    console.print(view.answers_table(answers))


def _ask(profile: Profile, kind: str, sizes: tuple[int, ...], dtype: str | None, layout: str | None,
         direction: str) -> Estimate:  # fmt: skip
    one: Estimate | Estimates
    if kind == "gemm":
        m, n, k, *batch = sizes
        one = profile.gemm(m, n, k, dtype=dtype, layout=layout, batch=batch[0] if batch else 1)
    elif kind == "softmax":
        one = profile.softmax(*sizes, dtype=dtype, mask="causal" if sizes[1] == sizes[2] else "none",
                              direction=direction)  # fmt: skip
    else:
        batch_size, heads, seq, head_dim, *kv_heads = sizes
        one = profile.attention(batch_size, heads, seq, seq, head_dim, kv_heads[0] if kv_heads else 0, dtype=dtype,
                                direction=direction)  # fmt: skip
    assert isinstance(one, Estimate)
    return one


def _whole(kind: str, text: str) -> tuple[int, ...]:
    words, counts = _QUERIES[kind]
    parts: list[Any] = text.split(",")
    if len(parts) not in counts or not all(_DIGITS.fullmatch(part.strip()) for part in parts):
        raise InputError(f"--{kind}", repr(text), words)
    return tuple(int(part) for part in parts)
