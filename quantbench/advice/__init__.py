"""Advice for whoever chooses a shape: what it costs on a GPU, what it wastes past edges, and better shapes near it."""

from quantbench.advice.advise import Advice, Advised, Unmeasured, advise
from quantbench.advice.answers import KernelTimes, ModelledTimes
from quantbench.advice.cost import Finding, OpCost, ShapeCost
from quantbench.advice.neighbours import Neighbour
from quantbench.advice.profile_times import ProfileTimes
from quantbench.advice.space import Repair, Space, repaired

__all__ = [
    "Advice",
    "Advised",
    "Finding",
    "KernelTimes",
    "ModelledTimes",
    "Neighbour",
    "OpCost",
    "ProfileTimes",
    "Repair",
    "ShapeCost",
    "Space",
    "Unmeasured",
    "advise",
    "repaired",
]
