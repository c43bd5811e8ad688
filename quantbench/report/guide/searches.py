"""What the hand searches on A100 that the folklore comes from measured end to end: seconds per iteration of a whole
training step, by number of heads and by hidden size. Read from the transcription of their tables."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from quantbench.errors import StoreError
from quantbench.files import open_text

_HEADS_SECTION = "NHEADs"


@dataclass(frozen=True)
class Iteration:
    """One row: a model of that hidden size, with `heads` heads (None where its table does not say), at MBS mbs; seconds
    and TFLOP/s per GPU as the table states them. line: in its document."""

    hidden: int
    heads: int | None
    mbs: int
    seconds: float
    tflops: float
    section: str
    line: int

    @property
    def head_dim(self) -> float:
        """Not whole in a shape that cannot be."""
        assert self.heads is not None
        return self.hidden / self.heads


def iterations(path: Path) -> tuple[Iteration, ...]:
    """Every timed row that names hidden size and MBS."""
    try:
        with open_text(path) as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise StoreError("guide", f"{path} ({error.strerror})", "the table of the searches, in a checkout") from None
    found = []
    for row in rows:
        needed = [row[name] for name in ("nhidden", "mbs", "sec_per_it", "tflops_reported")]
        if all(needed) and row["status"] == "ok":
            hidden, mbs = int(needed[0]), int(needed[1])
            heads = int(row["nheads"]) if row["nheads"] else None
            seconds, tflops = float(needed[2]), float(needed[3])
            found.append(Iteration(hidden, heads, mbs, seconds, tflops, row["section"], int(row["line"])))
    return tuple(found)


def head_searches(found: tuple[Iteration, ...]) -> tuple[Iteration, ...]:
    """The rows in which the number of heads alone was varied."""
    return tuple(row for row in found if row.section.startswith(_HEADS_SECTION))
