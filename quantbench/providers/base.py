"""The interface of a provider, which runs workloads: `Provider` prepares a `Task`, the harness times it.

A provider is stateless and cheap to make. Its id is `library.variant` (`torch.mm`, `torch.flash`, `triton.stream_k`),
and each record holds it. `quantbench.providers.catalog` lists the ids without importing torch.

A provider is not trusted: the harness writes the inputs and checks the results against its own references
(`quantbench.providers.correctness`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from quantbench.device.spec import DeviceSpec
    from quantbench.launch import Launch
    from quantbench.workload import Workload


@dataclass(frozen=True)
class Tolerance:
    """The largest error of a right result.

    relative_norm: bound on ‖out − ref‖ / ‖ref‖ over each output tensor. source: the reason for this bound.
    """

    relative_norm: float
    source: str


class Task(Protocol):
    """One workload with inputs and outputs allocated, ready to run any number of times.

    Memory is allocated when the task is made, so that `run` only launches: no allocation, no synchronisation, no Python
    beyond the call. A task may be captured into a CUDA graph, on a stream that `run` has been called on before.

    The harness may write new numbers into `inputs` between any two runs. So nothing may be computed from them before
    the run that uses it. One exception: the forward pass of a backward task may be kept from the first run on; after
    that only the gradient, the last input, changes.

    If a library's operation cannot write into given tensors, `run` drops the last results and takes new ones, which the
    caching allocator puts into the same memory; then `outputs` is empty before the first run.
    """

    def run(self) -> None:
        """Enqueue the work once on the current stream."""

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors that `run` reads, live and always the same, shaped and stored as `Inputs` makes them.

        gemm: a and b, and for `torch.addmm` a bias of n numbers. softmax: x, for a full mask the mask, for backward the
        gradient of the result. attention: q, k and v, for backward the gradient of the result.

        A task without this method is timed and graded D, since its results cannot be checked.
        """

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors that `run` writes, live (what the last run left, once the device has been synchronised)."""

    def launch(self) -> Launch | None:
        """The launch if the provider knows it, as our own kernels do; None if the profiler must find it."""


class Provider(Protocol):
    """Runs some kinds of workload on some devices."""

    id: str

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        """None when this provider can run the workload there, otherwise the reason in one sentence."""

    def prepare(self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0) -> Task:
        """Allocate inputs (random as asked) and outputs. Raises UnsupportedError or torch's out-of-memory error."""
