"""Models collectives between the GPUs of a node from the rate of their links.

A serving engine's own all-reduce reads small messages from every peer in one step, and reduces and
gathers large ones in two.
"""

from __future__ import annotations

import numpy as np

from quantbench.profile.linear_interpolation import FloatArray
from quantbench.workload import Collective

#: modelled message sizes, bytes
MESSAGES = tuple(2**power for power in range(8, 31))
#: time of an empty step, µs: 2.5 to 5 for one and about 8 for two in aiconfigurator's tables of
#: A100, H100 and GB200
_ONE_STEP_US = 4.0
_TWO_STEPS_US = 8.0
_NCCL_US = 15.0
#: share of a link's stated rate that they reach in these tables, and their most, GB/s, however fast
#: the link
_ONE_STEP_SHARE = 0.6
_ONE_STEP_MOST = 270.0
_TWO_STEPS_SHARE = 0.75
_TWO_STEPS_MOST = 500.0


def all_reduce_us(link_gb_per_s: float, num_gpus: int) -> FloatArray:
    """Returns the times of a serving engine's all-reduce of MESSAGES, (messages,) µs."""
    message_bytes = np.array(MESSAGES, dtype=np.float64)
    one_step = min(_ONE_STEP_SHARE * link_gb_per_s, _ONE_STEP_MOST)
    two_steps = min(_TWO_STEPS_SHARE * link_gb_per_s, _TWO_STEPS_MOST)
    read_us = (num_gpus - 1) * message_bytes / (one_step * 1e3)
    shared_us = _bus_bytes("all_reduce", num_gpus) / (two_steps * 1e3)
    return np.minimum(_ONE_STEP_US + read_us, _TWO_STEPS_US + shared_us)


def nccl_us(op: str, link_gb_per_s: float, num_gpus: int) -> FloatArray:
    """Returns the times of NCCL's collective of MESSAGES, (messages,) µs."""
    return _NCCL_US + _bus_bytes(op, num_gpus) / (_TWO_STEPS_SHARE * link_gb_per_s * 1e3)


def _bus_bytes(op: str, num_gpus: int) -> FloatArray:
    return np.array([float(Collective(op, size, num_gpus).bus_bytes) for size in MESSAGES])
