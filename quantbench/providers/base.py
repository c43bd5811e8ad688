"""Defines the interface of providers: a `Provider` prepares a `Task`, which the harness times.

A provider is stateless and cheap to create, and each record holds its id, `library.variant`
(`torch.mm`, `torch.flash`, `triton.stream_k`). A provider is not trusted: the harness writes the
inputs and checks the results against references of its own.
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
    """One workload with allocated inputs and outputs, ready to run any number of times.

    The task is created with all its inputs in memory, so that `run` only launches: it does not
    synchronise, take new memory from the device, or execute Python beyond the call. The first `run`
    on a stream may do so, to prepare later runs. A task may be captured into a CUDA graph, on a
    stream on which `run` has been called before.

    The harness may write new numbers into `inputs` between any two runs. A task must compute
    nothing from the inputs before the run that uses the result. There is one exception: the task of
    a backward pass may keep the results of the forward pass of its first run, because afterwards
    only the last input changes, which is the gradient.

    If the operation of a library cannot write into given tensors, `run` drops the last results and
    takes new ones, which the caching allocator puts into the same memory. In this case `outputs` is
    empty before the first run.
    """

    def run(self) -> None:
        """Enqueues the work once on the current stream."""

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that `run` reads, with the layout of `input_templates`.

        Each call returns the same objects, in this order:

        gemm: a and b.
        grouped_gemm: a and b, with the rows in the order of their experts.
        permute: x and the order; for direction `unpermute` x, the weights and the order.
        softmax: x, then the mask if the workload has a full mask, then the gradient of the result
            in the backward pass.
        attention: q, k and v, then the gradient of the result in the backward pass.

        A task without this method is timed and graded D, because its results cannot be checked.
        """

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that `run` writes.

        The tensors hold the results of the last run once the device is synchronised.
        """

    def launch(self) -> Launch | None:
        """Returns the launch if the provider knows it, as quantbench's own kernels do.

        Returns None if the profiler must find the launch.
        """


class Provider(Protocol):
    """Interface of a library variant that runs some kinds of workload on some devices.

    id: identifier of the provider, `library.variant`.
    """

    id: str

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        """Returns the reason why the provider cannot run the workload on the device.

        Returns None if it can.
        """

    def prepare(
        self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0
    ) -> Task:
        """Allocates random inputs and the outputs of a workload.

        distribution, seed: distribution and seed of the inputs (see `inputs.Inputs`).
        Raises UnsupportedError, or torch's out-of-memory error.
        """
