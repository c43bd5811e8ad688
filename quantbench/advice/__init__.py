"""Predicts the cost of a transformer shape on a GPU, the time lost past tile edges, and better
shapes near it.
"""

from quantbench.advice.advise import Advice, Advised, Unmeasured, advise
from quantbench.advice.cost import EdgeWaste, OpCost, ShapeCost
from quantbench.advice.search import Neighbour
from quantbench.advice.space import Space

__all__ = [
    "Advice",
    "Advised",
    "EdgeWaste",
    "Neighbour",
    "OpCost",
    "ShapeCost",
    "Space",
    "Unmeasured",
    "advise",
]
