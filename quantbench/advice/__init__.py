"""Predicts the cost of a transformer shape on a GPU, the time lost past tile and wave edges, and better shapes near it.

Entry points: `advise`, and `repaired` for shapes that tensor parallelism cannot split; their types `Advice`, `Advised`,
`Unmeasured`, `ShapeCost`, `OpCost`, `EdgeWaste`, `Neighbour`, `Space` and `Repair`. Used by users' Python code, by the
command `advise` and by tools.
"""

from quantbench.advice.advise import Advice, Advised, Unmeasured, advise
from quantbench.advice.cost import EdgeWaste, OpCost, ShapeCost
from quantbench.advice.neighbours import Neighbour
from quantbench.advice.space import Repair, Space, repaired

__all__ = [
    "Advice", "Advised", "EdgeWaste", "Neighbour", "OpCost", "Repair", "ShapeCost", "Space", "Unmeasured", "advise",
    "repaired",
]  # fmt: skip
