"""Predicts the cost of a transformer shape on a GPU, time lost past edges, and better shapes."""

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
