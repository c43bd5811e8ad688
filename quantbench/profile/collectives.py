"""Times of collectives from a profile: one curve of time over message size per op, GPUs and nodes.

There is no model of a network: a number of GPUs that was not measured has no answer. Between two measured messages the
time is a power of the size. A shorter message than any measured takes as long as the shortest, a longer one runs at the
longest one's rate; `latency.interconnect.Link` applies the same law. Entry point: `ask_collective`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import UnsupportedError, require_choice, require_int
from quantbench.latency.estimate import Estimate
from quantbench.profile.answers import IntArray, broadcast_sizes
from quantbench.profile.estimate import INTERPOLATED, MEASURED, MODELLED, Estimates
from quantbench.profile.sources import ALIKE, by_provider, most
from quantbench.profile.table import Table
from quantbench.workload.ops import COLLECTIVE_DTYPES, COLLECTIVE_OPS, LARGEST_MESSAGE_BYTES

FloatArray = npt.NDArray[np.float64]

_WHO = "profile.collective"
# Half-width in log time of what lies beyond the measured messages, or between so few that none can be left out.
_BLIND = log(1.3)
_LEAST_HALF_WIDTH = 0.01


@dataclass(frozen=True)
class Curve:
    """Measured messages of one collective, (rows,) each, ascending in message_bytes. half_width: of the 90 % interval
    between them, in log time. note: what to know of every answer."""

    message_bytes: IntArray
    latency_us: FloatArray
    low_us: FloatArray
    high_us: FloatArray
    half_width: float
    note: str

    def at(self, message_bytes: IntArray) -> Estimates:
        """The time of messages, (messages,)."""
        known, asked = np.log(self.message_bytes), np.log(message_bytes)
        latency_us = np.exp(np.interp(asked, known, np.log(self.latency_us)))
        latency_us *= np.maximum(message_bytes / self.message_bytes[-1], 1.0)
        row = np.minimum(np.searchsorted(self.message_bytes, message_bytes), len(known) - 1)
        measured = self.message_bytes[row] == message_bytes
        outside = (message_bytes < self.message_bytes[0]) | (message_bytes > self.message_bytes[-1])
        half_width = np.where(outside, max(self.half_width, _BLIND), self.half_width)
        notes = [self.note] if self.note else []
        if outside.any():
            notes.append(f"outside the measured messages ({self.message_bytes[0]} to {self.message_bytes[-1]} bytes)")
        exact = measured & (not self.note)
        return Estimates(
            np.where(measured, self.latency_us[row], latency_us),
            np.where(exact, self.low_us[row], latency_us * np.exp(-half_width)),
            np.where(exact, self.high_us[row], latency_us * np.exp(half_width)),
            np.where(exact, MEASURED, np.where(outside, MODELLED, INTERPOLATED)).astype(np.int8),
            outside,
            np.zeros(len(message_bytes)),
            message_bytes / float((self.message_bytes / self.latency_us).max()),
            "; ".join(notes),
        )


def ask_collective(
    table: Table, op: str, message_bytes: Any, num_gpus: int, num_nodes: int, dtype: str | None, provider: str | None
) -> Estimate | Estimates:
    """See `Profile.collective`."""
    require_choice(_WHO, "op", op, COLLECTIVE_OPS)
    if dtype is not None:
        require_choice(_WHO, "dtype", dtype, COLLECTIVE_DTYPES)
    require_int(_WHO, "num_gpus", num_gpus, low=2)
    require_int(_WHO, "num_nodes", num_nodes)
    (asked,), shape = broadcast_sizes(_WHO, ("message_bytes",), (message_bytes,), LARGEST_MESSAGE_BYTES)
    found = curve_of(table, op, num_gpus, num_nodes, dtype, provider).at(asked)
    return found[0] if shape == () else found.reshape(*shape)


def curve_of(table: Table, op: str, num_gpus: int, num_nodes: int, dtype: str | None, provider: str | None) -> Curve:
    """The measured messages of a collective. Raises UnsupportedError where there are none, naming those there are."""
    rows = (table["op"] == op) & (table["num_gpus"] == num_gpus) & (table["num_nodes"] == num_nodes)
    if not rows.any():
        over = f"{op} over {num_gpus} GPUs" + (f" on {num_nodes} nodes" if num_nodes > 1 else "")
        raise UnsupportedError(_WHO, f"{over} was not measured", _measured(table, op))
    kept = dtype if dtype is not None and (rows & (table["dtype"] == dtype)).any() else most(table, "dtype", rows)
    rows, _ = by_provider(table, rows & (table["dtype"] == kept), provider)
    found = table.where(rows)
    other = dtype is not None and kept != dtype
    log_us = np.log(found["latency_us"])
    half_width = _half_width(np.log(found["message_bytes"]), log_us) + (ALIKE if other else 0.0)
    note = f"{dtype} was not measured: taken to take as long as as many bytes of {kept}" if other else ""
    return Curve(found["message_bytes"], found["latency_us"], found["low_us"], found["high_us"], half_width, note)


def _half_width(log_bytes: FloatArray, log_us: FloatArray) -> float:
    """The 0.9 quantile of what each row but the outermost differs by from the line through its neighbours."""
    if len(log_us) < 3:
        return _BLIND
    share = (log_bytes[1:-1] - log_bytes[:-2]) / (log_bytes[2:] - log_bytes[:-2])
    between = log_us[:-2] * (1.0 - share) + log_us[2:] * share
    return max(_LEAST_HALF_WIDTH, float(np.quantile(np.abs(log_us[1:-1] - between), 0.9)))


def _measured(table: Table, op: str) -> str:
    """What was, in words."""
    if not len(table):
        return "a profile with collectives: of `quantbench comm`, or `quantbench import aiconfigurator --table nccl`"
    rows = table["op"] == op
    if not rows.any():
        return "one of " + ", ".join(np.unique(table["op"]).tolist())
    pairs = np.unique(np.stack([table["num_nodes"][rows], table["num_gpus"][rows]]), axis=1).T.tolist()
    return f"{op} over " + ", ".join(
        f"{gpus} GPUs" + (f" on {nodes} nodes" if nodes > 1 else "") for nodes, gpus in pairs
    )
