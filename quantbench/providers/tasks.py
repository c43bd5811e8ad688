"""Provides the base class of the built-in providers, and the tasks that they create.

A `LaunchTask` writes into given tensors. `ForwardTask` and `BackwardTask` run operations of torch
that return new tensors. They release their previous results first, so that torch's caching
allocator returns the same memory again.
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
# Names of workload kinds in error messages; other kinds are named as they are.
_KINDS = {"gemm": "matrix products", "grouped_gemm": "grouped products"}


class BuiltInProvider(Generic[_W]):
    """Base class of the built-in providers, each of which runs one kind of workload.

    A subclass sets `kind` and defines `refusal` and `task`.

    provider_id: id in `catalog`, such as `triton.split_k`. The part after the dot is the variant,
        by which a class that serves several ids distinguishes them.
    tile: tile that quantbench's kernel uses for every workload; default None lets the kernel choose
        from its menu of tiles.
    """

    kind: str

    def __init__(self, provider_id: str, tile: Tile | None = None) -> None:
        self.id = provider_id
        self.tile = tile
        self.variant = provider_id.partition("@")[0].partition(".")[2]

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        """Returns the reason why the provider cannot run the workload; None if it can."""
        if workload.kind != self.kind:
            runs = _KINDS.get(self.kind, self.kind)
            return f"{self.id} runs {runs}, not {workload.kind}"
        return self.refusal(cast("_W", workload), device)

    def prepare(
        self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0
    ) -> Task:
        """Allocates the inputs and the outputs, and prepares the task (see `base.Provider`)."""
        assert workload.kind == self.kind
        return self.task(cast("_W", workload), device, Inputs(device, distribution, seed))

    def refusal(self, work: _W, device: DeviceSpec) -> str | None:
        """Returns the reason why the provider cannot run a workload of its kind on the device.

        Returns None if the provider can run it.
        """
        raise NotImplementedError

    def task(self, work: _W, device: DeviceSpec, inputs: Inputs) -> Task:
        """Prepares the task for a workload.

        inputs: generator of the random inputs.
        """
        raise NotImplementedError


class _Task:
    """Base class of tasks. It states no launch, so the profiler must find it."""

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
    """Task that runs `call`, a function that reads `inputs` and writes into `outputs`.

    launch: launch of the kernel; default None means that the profiler must find it.
    before: function that is called once, before the first run, such as the forward pass that a
        backward pass needs; default nothing.
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
    """Task that runs `forward`, a function that reads `inputs` and returns a new tensor."""

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
    """Task that runs only the backward pass of `forward`, through a retained autograd graph.

    autograd runs the backward pass of an operation on the stream of its forward pass. If this is
    not the current stream, autograd makes the two streams wait for each other. The wait would be
    timed, and cannot be captured into a CUDA graph. The first `run` on each stream therefore runs
    the forward pass on this stream, and keeps its saved tensors. A CUDA graph reads these tensors,
    so it must be captured on a stream on which `run` has been called before.

    forward: function that returns the result of the forward pass.
    inputs: the tensors whose gradients are computed.
    gradient: gradient of the result of `forward`.
    mask: input of `forward` without a gradient; default none.
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

        Raises MeasurementError if this call is captured into a CUDA graph, and the task has not run
        on the current stream before.
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
