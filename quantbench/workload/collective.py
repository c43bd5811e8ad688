"""Collective operations between GPUs: what tensor, pipeline and data parallelism wait for."""

from dataclasses import dataclass

from quantbench.errors import InputError, require_choice, require_int
from quantbench.workload.dtypes import DTYPES

COLLECTIVE_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
#: what collectives may be asked for; the reduction depends on it, the bytes moved do not
COLLECTIVE_DTYPES = ("fp16", "bf16", "fp32", "int8", "fp8")
LARGEST_MESSAGE_BYTES = 2**46


@dataclass(frozen=True)
class Collective:
    """One collective operation `op` over num_gpus GPUs, spread evenly over num_nodes machines.

    message_bytes is the `size` of nccl-tests (doc/PERFORMANCE.md there): the larger of a rank's two buffers, that is
    the whole vector of all_reduce and broadcast, what all_gather leaves on each rank, what reduce_scatter takes from
    each rank, everything that one rank sends in all_to_all, and the message of send_recv.

    >>> Collective("all_reduce", message_bytes=1024, num_gpus=4).bus_bytes
    1536
    """

    op: str
    message_bytes: int
    num_gpus: int
    dtype: str = "bf16"
    num_nodes: int = 1

    kind = "collective"

    def __post_init__(self) -> None:
        require_choice("Collective", "op", self.op, COLLECTIVE_OPS)
        require_int("Collective", "message_bytes", self.message_bytes, high=LARGEST_MESSAGE_BYTES)
        require_int("Collective", "num_gpus", self.num_gpus, low=2, high=2**20)
        require_int("Collective", "num_nodes", self.num_nodes, high=2**20)
        require_choice("Collective", "dtype", self.dtype, COLLECTIVE_DTYPES)
        if self.num_gpus % self.num_nodes:
            raise InputError("Collective", f"num_nodes = {self.num_nodes}", f"a divisor of num_gpus = {self.num_gpus}")
        width = DTYPES[self.dtype].element_bytes
        if self.message_bytes % width:
            raise InputError("Collective", f"message_bytes = {self.message_bytes}", f"a multiple of {width}")

    @property
    def bus_bytes(self) -> int:
        """Bytes that each GPU must send over its links at the least, rounded up; divided by the time it is nccl-tests'
        bus bandwidth, which can be held against the link's own."""
        if self.op in ("broadcast", "send_recv"):
            return self.message_bytes
        once = self.message_bytes * (self.num_gpus - 1)
        return -(-(2 * once if self.op == "all_reduce" else once) // self.num_gpus)

    @property
    def flops(self) -> int:
        """No matrix arithmetic."""
        return 0

    @property
    def min_bytes(self) -> int:
        """Fewest bytes through one GPU's links (`bus_bytes`)."""
        return self.bus_bytes

    def __str__(self) -> str:
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return f"{self.op} {self.message_bytes} B over {self.num_gpus} GPUs{nodes} {self.dtype}"
