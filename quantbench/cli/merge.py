"""Command `merge`: merges several runs of one device kind into one run."""

from pathlib import Path

from quantbench.cli.options import argument, command, option
from quantbench.cli.output import Result


@command
def merge(
    runs: list[Path] = argument("Folders of the runs.", metavar="RUN…"),
    results: Path = option(
        ..., "Results folder in which the merged run is created.", "-o", "--output"
    ),
    run_id: str = option(
        "", "Name of the merged run (default: the first run's name with -merged)."
    ),
    force: bool = option(False, "Merge even if devices or software differ."),
) -> Result:
    """Merge runs of one device and software: each point once, with its most trusted measurement."""
    from quantbench.cluster.cards import card_lines, compare_devices
    from quantbench.cluster.merge import merge_runs, write_merged
    from quantbench.store.folder import read_one_run

    merged = merge_runs([read_one_run(folder) for folder in runs], run_id, force=force)
    folder = write_merged(results, merged)
    points = sum(record.role == "point" for record in merged.records)
    cards = card_lines(compare_devices(merged.records))
    answer = {
        "run": folder,
        "runs": len(runs),
        "points": points,
        "repeated": merged.repeated,
        "how_ended": merged.info.how_ended,
        "notes": merged.notes,
        "cards": cards,
    }
    said = f"{len(runs)} runs of {merged.info.device.name}, {points} points"
    if merged.repeated:
        said += f"; {merged.repeated} were there twice, and the better trusted measurement stands"
    notes = [(("note:", "yellow"), f" {note}") for note in merged.notes]
    where = (f"kept in {folder}/", f"Next: quantbench check {folder}")
    return Result(answer, (said, *notes, *cards, *where))
