"""The edges that `sweep --refine` bisected to, as lines for people and objects for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantbench.sweep.refine import Edge, PlacedGap

Edges = Sequence[tuple[PlacedGap, Edge]]


def edge_lines(edges: Edges) -> list[str]:
    """One line an edge: `edge in gemm (torch.mm): n = 3328 to 3336, 1.34 times the time`."""
    if not edges:
        return ["no step of 5 % or more was found to bisect to"]
    lines = []
    for placed, edge in edges:
        held = "".join(f", {name.replace('_', '-')} = {value}" for name, value in placed.held.items())
        open_end = "" if edge.exact else " (not bisected to the end)"
        lines.append(
            f"edge in {placed.op} ({placed.provider}): {placed.axis.replace('_', '-')} = {edge.low} to {edge.high}"
            f"{held}, {edge.ratio:.2f} times the time{open_end}"
        )
    return lines


def edges_to_json(edges: Edges) -> list[dict[str, Any]]:
    """The edges as JSON objects."""
    return [
        {
            "axis": placed.axis, "op": placed.op, "provider": placed.provider, "held": dict(placed.held),
            "low": edge.low, "high": edge.high, "ratio": edge.ratio, "exact": edge.exact,
        }
        for placed, edge in edges
    ]  # fmt: skip
