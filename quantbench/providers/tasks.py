"""Provides the base class of quantbench's own providers, and the tasks that they create.

A kernel of quantbench writes into given tensors, but some operations of torch return new tensors. A
task of such an operation first releases its previous results, so that torch's caching allocator
returns the same memory again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import torch

from quantbench.errors import MeasurementError
from quantbench.launch import Launch
from quantbench.providers.base import Task
from quantbench.providers.inputs import Inputs

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec
    from quantbench.launch import Tile
    from quantbench.workload import Workload

_W = TypeVar("_W")
# Words for kinds of workload in error messages.
_KINDS = {"gemm": "matrix products", "grouped_gemm": "grouped products"}


class BuiltInProvider(Generic[_W]):
    """Base class of the providers of one kind of workload.

    A subclass sets `kind` and defines `refusal` and `task`.

    provider_id: id in `catalog`. Its second part names the variant, if a class serves several.
    tile: tile of quantbench's kernel for every workload; None selects a tile from the kernel's
        menu.
    """

    kind: str

    def __init__(self, provider_id: str, tile: Tile | None = None) -> None:
        self.id = provider_id
        self.tile = tile
        self.variant = provider_id.partition("@")[0].partition(".")[2]

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        if workload.kind != self.kind:
            runs = _KINDS.get(self.kind, self.kind)
            return f"{self.id} runs {runs}, not {workload.kind}"
        return self.refusal(cast("_W", workload), device)

    def prepare(
        self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0
    ) -> Task:
        """Allocates the inputs and the outputs, and compiles the kernels."""
        assert workload.kind == self.kind
        return self.task(cast("_W", workload), device, Inputs(device, distribution, seed))

    def refusal(self, work: _W, device: DeviceSpec) -> str | None:
        """Returns the reason why the provider cannot run a workload of its kind on the device.

        Returns None if it can.
        """
        raise NotImplementedError

    def task(self, work: _W, device: DeviceSpec, inputs: Inputs) -> Task:
        """Prepares the task of a workload of the provider's kind.

        inputs: generator of the random inputs.
        """
        raise NotImplementedError


class _Task:
    """Base class of tasks. The launch is unknown, so the profiler must find it."""

    def __init__(
        self, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...] = ()
    ) -> None:
        self._inputs = inputs
        self._outputs = outputs

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self._inputs

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Returns the results of the last run; empty before the first run of a torch operation."""
        return self._outputs

    def launch(self) -> Launch | None:
        return None


class LaunchTask(_Task):
    """Task that runs `call`, which writes into `outputs`.

    launch: the launch of the kernel; None if the profiler must find it.
    before: function that is called once, before the first run, such as the forward pass that a
        backward pass needs.
    """

    def __init__(
        self,
        call: Callable[[], object],
        inputs: tuple[torch.Tensor, ...],
        outputs: tuple[torch.Tensor, ...],
        *,
        launch: Launch | None = None,
        before: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(inputs, outputs)
        self._call = call
        self._before = before
        self._launch = launch

    def run(self) -> None:
        if self._before is not None:
            self._before()
            self._before = None
        self._call()

    def launch(self) -> Launch | None:
        return self._launch


class ForwardTask(_Task):
    """Task that runs `forward`, which reads `inputs` and returns a new tensor."""

    def __init__(
        self, forward: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...]
    ) -> None:
        super().__init__(inputs)
        self._forward = forward

    def run(self) -> None:
        """Runs `forward` without recording it for autograd."""
        self._outputs = ()
        with torch.no_grad():
            self._outputs = (self._forward(),)


class BackwardTask(_Task):
    """Task that runs only the backward pass of `forward`, through a retained graph.

    autograd runs the backward pass of each operation on the stream of its forward pass. If that
    stream is not the current one, autograd makes the two streams wait for each other, which would
    be timed and cannot be captured. So the first `run` on each stream runs the forward pass and
    keeps its saved tensors, which a CUDA graph captured on this stream reads. A graph must be
    captured on a stream on which `run` has been called before.

    inputs: the tensors whose gradients are computed.
    gradient: gradient of the result of `forward`.
    mask: an input of `forward` that has no gradient.
    """

    def __init__(
        self,
        forward: Callable[[], torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
        gradient: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> None:
        self._forward = forward
        self._leaves = tuple(tensor.requires_grad_() for tensor in inputs)
        self._gradient = gradient
        self._results: dict[int, torch.Tensor] = {}  # result of `forward` on each stream
        masks = () if mask is None else (mask,)
        super().__init__((*self._leaves, *masks, gradient))

    def run(self) -> None:
        """Computes the gradients of the inputs.

        Raises MeasurementError if this call is captured on a stream on which the task has not run
        before.
        """
        result = self._result()
        self._outputs = ()
        self._outputs = torch.autograd.grad(result, self._leaves, self._gradient, retain_graph=True)

    def _result(self) -> torch.Tensor:
        """Returns the result of `forward` on the current stream.

        The result is computed once for each stream.
        """
        cuda = self._gradient.is_cuda
        stream = torch.cuda.current_stream().cuda_stream if cuda else 0
        result = self._results.get(stream)
        if result is None:
            if cuda and torch.cuda.is_current_stream_capturing():
                raise MeasurementError(
                    "backward",
                    "captured on a stream that it has not run on",
                    "one run on that stream before",
                )
            with torch.enable_grad():
                result = self._results[stream] = self._forward()
        return result
