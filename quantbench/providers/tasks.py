"""Provides the base class of quantbench's own providers and the tasks they create.

`LaunchTask` runs kernels that write into given tensors. `ForwardTask` and `BackwardTask` run torch
operations that return new tensors: each run first releases the previous results, so that torch's
caching allocator returns the same memory again.
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
# Words for kinds of workloads.
_KINDS = {"gemm": "matrix products", "grouped_gemm": "grouped products"}


class BuiltInProvider(Generic[_W]):
    """Base of the providers of one kind of workload. A subclass sets `kind` and defines `refusal`
    and `task`.

    provider_id: id in `catalog`; its second part names the variant, if a class serves several.
    tile: tile of a kernel of ours for every workload; None selects one from the kernel's menu.
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
        """Allocates inputs with `Inputs.operands` and outputs; compiles the kernels."""
        assert workload.kind == self.kind
        return self.task(cast("_W", workload), device, Inputs(device, distribution, seed))

    def refusal(self, work: _W, device: DeviceSpec) -> str | None:
        """Like `unsupported`, for a workload of `kind`."""
        raise NotImplementedError

    def task(self, work: _W, device: DeviceSpec, inputs: Inputs) -> Task:
        """Like `prepare`, for a workload of `kind`."""
        raise NotImplementedError


class _Task:
    """Base of tasks; its launch is unknown, so the profiler must find it."""

    def __init__(
        self, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...] = ()
    ) -> None:
        self._inputs = inputs
        self._outputs = outputs

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self._inputs

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Returns the last run's results; empty before the first run of a torch operation."""
        return self._outputs

    def launch(self) -> Launch | None:
        return None


class LaunchTask(_Task):
    """Task that runs `call`, which writes into `outputs`.

    before: function called once ahead of the first run, for the forward pass that a backward pass
        needs.
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
    """Task that runs `forward`, which reads `inputs`."""

    def __init__(
        self, forward: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...]
    ) -> None:
        super().__init__(inputs)
        self._forward = forward

    def run(self) -> None:
        """Runs forward, without recording for autograd."""
        self._outputs = ()
        with torch.no_grad():
            self._outputs = (self._forward(),)


class BackwardTask(_Task):
    """Task that runs only the backward pass of `forward`: the gradients of `inputs`, through a
    retained graph.

    inputs: tensors that get a gradient.
    gradient: gradient of the result.
    mask: input of forward without a gradient.

    autograd runs each operation's backward on the stream that its forward ran on and makes the two
    streams wait for each other where that is not the current one, which would be timed and cannot
    be captured. So the first `run` on each stream runs the forward pass and keeps its saved
    tensors, which a CUDA graph captured there reads. A graph must be captured on a stream that
    `run` was called on before.
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
        self._results: dict[int, torch.Tensor] = {}  # by stream
        masks = () if mask is None else (mask,)
        super().__init__((*self._leaves, *masks, gradient))

    def run(self) -> None:
        result = self._result()
        self._outputs = ()
        self._outputs = torch.autograd.grad(result, self._leaves, self._gradient, retain_graph=True)

    def _result(self) -> torch.Tensor:
        """Returns forward's result on the current stream."""
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
