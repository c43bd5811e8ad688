"""Tasks for torch operations that return new tensors and cannot write into given ones.

Each run first lets go of the previous results, so that torch's caching allocator hands out the same memory again: no
cudaMalloc after the first run, and the addresses stay. In a CUDA graph the results live in the graph's own pool.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quantbench.errors import MeasurementError
from quantbench.launch import Launch


class ForwardTask:
    """Runs `forward`; the inputs are inside it."""

    def __init__(self, forward: Callable[[], torch.Tensor], reference: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        self._forward = forward
        self._reference = reference
        self._outputs: tuple[torch.Tensor, ...] = ()

    def run(self) -> None:
        """Run forward, without recording for autograd."""
        self._outputs = ()
        with torch.no_grad():
            self._outputs = (self._forward(),)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """The last run's result; empty before the first."""
        return self._outputs

    def reference(self) -> tuple[torch.Tensor, ...]:
        """The float64 result."""
        return self._reference()

    def launch(self) -> Launch | None:
        """Not known; the profiler tells."""
        return None


class BackwardTask:
    """Runs only the backward pass of `forward`: the gradients of `inputs`, through a graph that is kept.

    autograd runs each operation's backward on the stream that its forward ran on and makes the two streams wait for
    each other where that is not the current one, which would be timed and cannot be captured. So the forward is run
    again, once, whenever `run` meets a new stream. A CUDA graph must be captured on a stream that `run` was called on
    before.
    """

    def __init__(
        self,
        forward: Callable[[], torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
        gradient: torch.Tensor,
        reference: Callable[[], tuple[torch.Tensor, ...]],
    ) -> None:
        self._forward = forward
        self._inputs = tuple(tensor.requires_grad_() for tensor in inputs)
        self._gradient = gradient
        self._reference = reference
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._stream: int | None = None
        self._result = self._run_forward()

    def run(self) -> None:
        """Compute the gradients once."""
        if self._gradient.is_cuda and torch.cuda.current_stream().cuda_stream != self._stream:
            if torch.cuda.is_current_stream_capturing():
                raise MeasurementError(
                    "backward", "captured on a stream that it has not run on", "one run on that stream before"
                )
            self._result = self._run_forward()
        self._outputs = ()
        self._outputs = torch.autograd.grad(self._result, self._inputs, self._gradient, retain_graph=True)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """The last run's gradients, one per input; empty before the first."""
        return self._outputs

    def reference(self) -> tuple[torch.Tensor, ...]:
        """The float64 gradients."""
        return tuple(self._reference())

    def launch(self) -> Launch | None:
        """Not known; the profiler tells."""
        return None

    def _run_forward(self) -> torch.Tensor:
        if self._gradient.is_cuda:
            self._stream = torch.cuda.current_stream().cuda_stream
        with torch.enable_grad():
            return self._forward()
