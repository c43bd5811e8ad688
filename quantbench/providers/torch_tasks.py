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
    """Runs `forward`, which reads `inputs`."""

    def __init__(self, forward: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> None:
        self._forward = forward
        self._inputs = inputs
        self._outputs: tuple[torch.Tensor, ...] = ()

    def run(self) -> None:
        """Run forward, without recording for autograd."""
        self._outputs = ()
        with torch.no_grad():
            self._outputs = (self._forward(),)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """The last run's result; empty before the first."""
        return self._outputs

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """What forward reads."""
        return self._inputs

    def launch(self) -> Launch | None:
        """Not known; the profiler tells."""
        return None


class BackwardTask:
    """Runs only the backward pass of `forward`: the gradients of `inputs`, through a graph that is kept. mask: read by
    forward, without a gradient.

    autograd runs each operation's backward on the stream that its forward ran on and makes the two streams wait for
    each other where that is not the current one, which would be timed and cannot be captured. So the forward is run
    by the first `run` on each stream, and what it saved is kept: a CUDA graph captured there reads it. A
    graph must be captured on a stream that `run` was called on before.
    """

    def __init__(
        self,
        forward: Callable[[], torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
        gradient: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> None:
        self._forward = forward
        self._inputs = tuple(tensor.requires_grad_() for tensor in inputs)
        self._gradient = gradient
        self._mask = mask
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._results: dict[int, torch.Tensor] = {}  # by stream

    def run(self) -> None:
        """Compute the gradients once."""
        result = self._result()
        self._outputs = ()
        self._outputs = torch.autograd.grad(result, self._inputs, self._gradient, retain_graph=True)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """The last run's gradients, one per input; empty before the first."""
        return self._outputs

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The inputs of forward, the mask where there is one, and the gradient of the result."""
        mask = () if self._mask is None else (self._mask,)
        return (*self._inputs, *mask, self._gradient)

    def launch(self) -> Launch | None:
        """Not known; the profiler tells."""
        return None

    def _result(self) -> torch.Tensor:
        """The forward's result on the current stream."""
        cuda = self._gradient.is_cuda
        stream = torch.cuda.current_stream().cuda_stream if cuda else 0
        result = self._results.get(stream)
        if result is None:
            if cuda and torch.cuda.is_current_stream_capturing():
                raise MeasurementError(
                    "backward", "captured on a stream that it has not run on", "one run on that stream before"
                )
            with torch.enable_grad():
                result = self._results[stream] = self._forward()
        return result
