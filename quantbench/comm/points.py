"""Which collectives are measured: operations over message sizes, as text and as workloads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from quantbench.errors import InputError, require_choice
from quantbench.workload import Collective
from quantbench.workload.dtypes import element_bytes
from quantbench.workload.ops import COLLECTIVE_DTYPES, COLLECTIVE_OPS

DEFAULT_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
#: sizes that are measured unless others are asked for, by backend: a GPU's links saturate near a gigabyte, gloo over a
#: loopback or an Ethernet long before
DEFAULT_SIZES = {"nccl": "4KiB:1GiB", "gloo": "4KiB:16MiB"}
#: repeated between the operations: what changes in it is the network, not the work
REFERENCE = {"nccl": ("all_reduce", 2**24), "gloo": ("all_reduce", 2**18)}
_STEP = 4
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(B|KiB|MiB|GiB|KB|MB|GB)?", re.IGNORECASE)
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_sizes(text: str) -> tuple[int, ...]:
    """`4KiB:1GiB` (from, to, times four each step), `4KiB:1GiB:x2`, or a list `1MiB,64MiB`; in bytes, ascending.

    >>> parse_sizes("1KiB:16KiB")
    (1024, 4096, 16384)
    >>> parse_sizes("1MB,512KiB")
    (524288, 1000000)
    """
    parts = text.split(":")
    if len(parts) == 1:
        return tuple(sorted({_bytes(word, text) for word in text.split(",")}))
    step = _STEP
    if len(parts) == 3:
        if not re.fullmatch(r"x\d{1,9}", parts[2], re.ASCII) or int(parts[2][1:]) < 2:
            raise InputError("--sizes", repr(text), "from:to:xN with N of at least 2, such as 4KiB:1GiB:x2")
        step = int(parts[2][1:])
    if len(parts) > 3:
        raise InputError("--sizes", repr(text), "from:to, from:to:xN or a list")
    low, high = _bytes(parts[0], text), _bytes(parts[1], text)
    if low > high:
        raise InputError("--sizes", repr(text), "the smaller size first")
    sizes = [low]
    while sizes[-1] * step <= high:
        sizes.append(sizes[-1] * step)
    return tuple(sizes)


def _bytes(word: str, text: str) -> int:
    match = _SIZE.fullmatch(word.strip())
    size = float(match[1]) * _UNITS[(match[2] or "B").lower()] if match else 0
    if size < 1:
        raise InputError("--sizes", repr(text), "sizes such as 4KiB, 1MB or 65536")
    return int(size)


def points(
    ops: Sequence[str], sizes: Sequence[int], *, num_gpus: int, num_nodes: int, dtype: str
) -> tuple[Collective, ...]:
    """Every operation at every size. A size is rounded up to whole elements for each rank, as nccl-tests does, and
    sizes that become equal by that are measured once."""
    require_choice("comm", "dtype", dtype, COLLECTIVE_DTYPES)
    for op in ops:
        require_choice("comm", "op", op, COLLECTIVE_OPS)
    unit = num_gpus * element_bytes(dtype)
    found: dict[Collective, None] = {}
    for op in ops:
        for size in sizes:
            found[Collective(op, -(-size // unit) * unit, num_gpus, dtype, num_nodes)] = None
    return tuple(found)


def reference_point(backend: str, like: Collective) -> Collective:
    """The point that is repeated, for the ranks and the number format of another."""
    op, size = REFERENCE[backend]
    unit = like.num_gpus * element_bytes(like.dtype)
    return replace(like, op=op, message_bytes=-(-size // unit) * unit)
