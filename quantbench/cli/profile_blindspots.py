"""What `quantbench profile blindspots` does and says."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quantbench.cli.console import output, say
from quantbench.cli.profile_export import percentage, profile_of
from quantbench.cli.writable import check_file
from quantbench.errors import InputError, StoreError, require_choice, require_int
from quantbench.profile.blindspots import TARGETS, FloatArray, Line, replay
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
from quantbench.profile.profile import Profile
from quantbench.units import percent

_WHO = "profile blindspots"
_FEWEST_MODEL_ROWS = 20
_MOST_MODEL_ROWS = 20_000
_SHOWN = 10
#: the markers in docs that the experiment's table stands between
SECTION = "blindspots"


def run_blindspots(
    run: Path, consumer: str, bound: str, target: str, held_out: bool, rows: int, shapes: Path | None,
    docs: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Find, or try on held-out rows; print, and write the files that were asked for."""
    from threadpoolctl import threadpool_limits  # comes with scikit-learn, which needs it

    share = percentage("--bound", bound)
    require_int(_WHO, "--rows", rows, low=_FEWEST_MODEL_ROWS, high=_MOST_MODEL_ROWS)
    if docs is not None and not held_out:
        raise InputError(_WHO, "--docs without --held-out", "both: the experiment's table is what docs show")
    if shapes is not None and held_out:
        raise InputError(_WHO, "--shapes with --held-out", "one of them: held-out rows were measured already")
    require_choice(_WHO, "--for", consumer, CONSUMERS)
    require_choice(_WHO, "--of", target, TARGETS)
    if shapes is not None:
        check_file(_WHO, shapes)
    if docs is not None:
        around_markers(docs, SECTION)
    profile = profile_of([run], fit=False)
    with threadpool_limits(1):
        if held_out:
            _held_out(profile, consumer, share, target, rows, docs, as_json)
        else:
            _find(run, profile, consumer, share, target, rows, shapes, as_json)


def _find(
    run: Path, profile: Profile, consumer: str, bound: float, target: str, rows: int, shapes: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    console = output(stderr=as_json)
    say(console, f"{profile.device.name} as {consumer}'s table; making a model, asking it between the rows")
    # A profile's file carries a model of its rows; of a run one must be made.
    found = find(profile, consumer, bound, target, rows, own_model=os.path.isfile(run))
    if shapes is not None:
        _write_shapes(shapes, found)
    if as_json:
        print(json.dumps(found_to_json(found, bound, target, _SHOWN), indent=1))
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
        raise StoreError(_WHO, f"{path} ({error.strerror})", "a file that can be written") from None


def _held_out(
    profile: Profile, consumer: str, bound: float, target: str, rows: int, docs: Path | None, as_json: bool
) -> None:
    console = output(stderr=as_json)
    table, dtype = measured_products(profile, consumer)
    ask, who = consumer_of(profile.device.name, dtype)
    found = replay(table, thin_model(profile, table, dtype, rows), ask, bound, target)
    sources = [run.source or run.run_id for run in profile.provenance.runs]
    origins = [f"{profile.device.name}: {found.total_rows:,} products of {dtype} from {'; '.join(sources)}"]
    if docs is not None:
        write_between(docs, SECTION, replay_markdown(found, who, origins))
    if as_json:
        print(json.dumps(replay_to_json(found, who), indent=1))
        return
    say(console, f"{origins[0]}, interpolated by {who}")
    say(console, "errors: median / p95 of |interpolated / measured - 1|, in %")
    _print_table(console, found.lines)
    if docs is not None:
        say(console, f"written into {docs}")


def _print_table(console: Console, lines: Sequence[Line]) -> None:
    table = Table(header_style="bold", box=None, pad_edge=False)
    for number, name in enumerate(replay_columns(lines[0])):
        table.add_column(name, justify="left" if number == 0 else "right")
    for line in lines:
        table.add_row(*replay_cells(line))
    console.print(table)
