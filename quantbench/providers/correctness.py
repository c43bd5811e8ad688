"""Correct before timed: a provider's results on fresh random inputs against a float64 reference.

The outputs are poisoned first, so that an element that nobody writes cannot pass for a right one left from before:
with NaN in floating point, with the largest number in integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from quantbench.errors import MeasurementError
from quantbench.providers.stand_ins import stand_in

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec
    from quantbench.providers.base import Provider, Tolerance
    from quantbench.workload import Workload


def check(provider: Provider, workload: Workload, device: DeviceSpec, *, seed: int = 0) -> None:
    """Run `workload`, or a smaller one of its kind, once on normal inputs and compare.

    Raises MeasurementError naming provider, workload, error and bound when a result is further from its reference
    than the provider's tolerance, is not a number, was not written, or has another shape. Raises what the provider
    raises.
    """
    smaller = stand_in(workload, device.kind)
    if provider.unsupported(smaller, device) is not None:
        smaller = workload
    who = f"check {provider.id} on {smaller}"
    task = provider.prepare(smaller, device, seed=seed + 1)  # not the inputs that will be timed
    if not task.outputs():
        task.run()  # results of operations that allocate them exist, and are reused, only from here on
    poison(task.outputs())
    task.run()
    outputs, references = task.outputs(), task.reference()
    if len(outputs) != len(references):
        raise MeasurementError(who, f"{len(outputs)} outputs", f"{len(references)}, one per reference")
    for index, (output, reference) in enumerate(zip(outputs, references, strict=True)):
        name = who if len(outputs) == 1 else f"{who}, output {index}"
        compare(name, output, reference, provider.tolerance(smaller))


def poison(tensors: Sequence[torch.Tensor]) -> None:
    """Fill with NaN, or with the largest number where the format has no NaN."""
    for tensor in tensors:
        with torch.no_grad():
            if tensor.dtype.is_floating_point:
                tensor.fill_(torch.nan)
            else:
                tensor.fill_(torch.iinfo(tensor.dtype).max)


def compare(who: str, output: torch.Tensor, reference: torch.Tensor, tolerance: Tolerance) -> None:
    """Raise MeasurementError unless ‖output − reference‖ / ‖reference‖ is within the tolerance.

    >>> from quantbench.providers.base import Tolerance
    >>> compare("check", torch.tensor([2.0]), torch.tensor([1.0]), Tolerance(1e-3, "fp16"))
    Traceback (most recent call last):
    quantbench.errors.MeasurementError: check: relative error 1; expected at most 0.001 (fp16)
    """
    if output.shape != reference.shape:
        raise MeasurementError(who, f"a result of shape {tuple(output.shape)}", f"{tuple(reference.shape)}")
    with torch.no_grad():
        unwritten = _unwritten(output, reference)
        if unwritten:
            raise MeasurementError(
                who, f"{unwritten} of {output.numel()} elements not written or not a number", "every element"
            )
        error = relative_error(output, reference)
    if not error <= tolerance.relative_norm:
        raise MeasurementError(
            who, f"relative error {error:.3g}", f"at most {tolerance.relative_norm:g} ({tolerance.source})"
        )


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """‖output − reference‖ / ‖reference‖ in float64; ‖output‖ where the reference is zero. NaN stays NaN.

    >>> relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0]))
    1.3333333333333333
    """
    difference = float(torch.linalg.vector_norm(output.double() - reference.double()))
    size = float(torch.linalg.vector_norm(reference.double()))
    return difference / size if size != 0 else difference


def _unwritten(output: torch.Tensor, reference: torch.Tensor) -> int:
    if output.dtype.is_floating_point:
        return int((~output.isfinite()).sum().item())
    largest = torch.iinfo(output.dtype).max
    return int(((output == largest) & (reference != largest)).sum().item())
