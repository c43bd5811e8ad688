"""Defines the interface of providers: a `Provider` prepares a `Task`, which the harness times.

A provider is stateless and cheap to create. Its id `library.variant` (`torch.mm`, `torch.flash`,
`triton.stream_k`) is stored in each record. The harness does not trust providers: it writes the
inputs itself, and checks the results against separate reference computations.
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
    """Largest error with which a result counts as correct.

    relative_norm: bound on ‖out − ref‖ / ‖ref‖ for each output tensor.
    source: reason for this bound, for messages.
    """

    relative_norm: float
    source: str


class Task(Protocol):
    """One workload with allocated inputs and outputs, ready to run any number of times.

    All inputs are in memory when the task is created, so that `run` only launches kernels. It must
    not synchronise, allocate new device memory, or execute Python beyond the call. The first `run`
    on a stream may do all of this, to prepare later runs. The harness may capture a task into a
    CUDA graph, on a stream on which `run` has been called before.

    The harness may write new numbers into `inputs` between any two runs, so a task must not keep
    values that it computed from earlier inputs. There is one exception: the task of a backward pass
    may keep the results of its forward pass, because only the last input, which is the gradient,
    changes after the first run.

    Some library operations cannot write into given tensors. Their `run` drops the last results and
    allocates new ones, which the caching allocator puts into the same memory. In this case
    `outputs` is empty before the first run.
    """

    def run(self) -> None:
        """Enqueues the workload once on the current stream."""

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that `run` reads, with the layout of `input_templates`.

        Each call returns the same objects, in this order:

        gemm: a and b.
        grouped_gemm: a and b, with the rows in the order of their experts.
        permute: x and the order; for direction `unpermute` x, the weights and the order.
        softmax: x, then the mask if the workload has a full mask, then the gradient of the result
            in the backward pass.
        attention: q, k and v, then the gradient of the result in the backward pass.

        A task without this method is timed but graded D, because its results cannot be checked.
        """

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that `run` writes.

        After a synchronisation of the device, the tensors contain the results of the last run.
        """

    def launch(self) -> Launch | None:
        """Returns the kernel launch (grid, tile) if the provider knows it.

        quantbench's own kernels know their launch. For None, the profiler finds the launch.
        """


class Provider(Protocol):
    """Interface of a library variant that runs some kinds of workload on some devices.

    id: identifier of the provider, `library.variant`; `package.module:Class` for a user's provider.
    """

    id: str

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        """Returns the reason why the provider cannot run the workload on the device, else None."""

    def prepare(
        self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0
    ) -> Task:
        """Prepares the task of a workload, with random inputs and allocated outputs.

        distribution, seed: distribution and seed of the inputs (see `inputs.Inputs`).

        Raises UnsupportedError if the provider cannot run the workload, or torch's out-of-memory
        error.
        """
