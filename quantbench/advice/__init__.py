"""Advises on transformer shapes for a GPU: predicted cost, time lost past edges, faster shapes.

`advise` returns the advice on one shape. `pad.padding_verdict` decides whether to pad one GEMM.
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
