"""Defines the interface of providers: a `Provider` prepares a `Task`, which the harness times.

A provider is stateless and cheap to create. Its id is `library.variant` (`torch.mm`, `torch.flash`,
`triton.stream_k`), and each record holds it; `catalog` lists the ids. A provider is not trusted:
the harness writes the inputs and checks the results against its own references (`correctness`).
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
    """Largest error of a correct result.

    relative_norm: bound on ‖out − ref‖ / ‖ref‖ over each output tensor.
    source: reason for this bound.
    """

    relative_norm: float
    source: str


class Task(Protocol):
    """One workload with inputs and outputs allocated, ready to run any number of times.

    Memory is allocated when the task is created, so that `run` only launches: no allocation, no
    synchronisation, no Python beyond the call. A task may be captured into a CUDA graph, on a
    stream that `run` has been called on before.

    The harness may write new numbers into `inputs` between any two runs. Nothing may be computed
    from them before the run that uses it. One exception: the forward pass of a backward task may be
    kept from the first run on; after that only the gradient, the last input, changes.

    If a library's operation cannot write into given tensors, `run` drops the last results and takes
    new ones, which the caching allocator puts into the same memory; then `outputs` is empty before
    the first run.
    """

    def run(self) -> None:
        """Enqueues the work once on the current stream."""

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that `run` reads, the same objects on each call, with the layout of
        `input_templates`.

        gemm: a and b.
        grouped_gemm: a and b, rows in the order of their experts. permute: x, for a sum the
            weights, and the order.
        softmax: x; for a full mask the mask; for backward the gradient of the result.
        attention: q, k and v; for backward the gradient of the result.

        A task without this method is timed and graded D, since its results cannot be checked.
        """

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that `run` writes; valid for the last run once the device is
        synchronised.
        """

    def launch(self) -> Launch | None:
        """Returns the launch if the provider knows it, as our own kernels do; None if the profiler
        must find it.
        """


class Provider(Protocol):
    """Interface of a library variant that runs some kinds of workload on some devices."""

    id: str

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        """Returns why the provider cannot run the workload on the device; None if it can."""

    def prepare(
        self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0
    ) -> Task:
        """Allocates random inputs and outputs. Raises UnsupportedError or torch's out-of-memory
        error.
        """
