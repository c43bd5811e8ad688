"""Predicts the cost of a transformer shape on a GPU, its waste past edges, and better shapes near it.

Entry points: `advise`, and `repaired` for shapes that tensor parallelism cannot split. Used by users' Python code and
by the command `advise`.
"""

from quantbench.advice.advise import Advice, Advised, Unmeasured, advise
from quantbench.advice.cost import EdgeWaste, OpCost, ShapeCost
from quantbench.advice.neighbours import Neighbour
from quantbench.advice.space import Repair, Space, repaired

__all__ = [
    "Advice",
    "Advised",
    "EdgeWaste",
    "Neighbour",
    "OpCost",
    "Repair",
    "ShapeCost",
    "Space",
    "Unmeasured",
    "advise",
    "repaired",
]
