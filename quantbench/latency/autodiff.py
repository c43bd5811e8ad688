"""Computes reverse-mode gradients of numpy expressions, for fitting GEMM cost models.

Operations on plain arrays return plain arrays. Operations on a `Variable`, which numpy dispatches
to this module (NEP 13), also record their backward function. The same expression therefore serves
for prediction and for fitting.

>>> x = Variable(np.array([2.0, 3.0]))
>>> y = np.exp(x * 2.0) + x
>>> gradient(y, x, np.ones(2)) == 2.0 * np.exp([4.0, 6.0]) + 1.0
array([ True,  True])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

FloatArray = npt.NDArray[np.float64]
#: Exponents below this value are raised to it. e^-50 is about 2e-22, which is negligible. Lower
#: exponents could give denormal numbers, which are slow.
NEGLIGIBLE = -50.0

Back = Callable[[FloatArray], FloatArray]


class Variable(NDArrayOperatorsMixin):
    """Array that records the operands it was computed from.

    The numpy functions in `_GRADIENTS` and the operators that use them are supported.

    value: the plain array.
    parents: pairs of an operand and its backward function, which maps this array's gradient to the
        operand's gradient.
    """

    __slots__ = ("gradient", "parents", "value")

    def __init__(self, value: FloatArray, parents: tuple[tuple[Variable, Back], ...] = ()) -> None:
        self.value = value
        self.parents = parents
        self.gradient: FloatArray | None = None

    def __array_ufunc__(self, function: np.ufunc, method: str, *operands: Any) -> Any:
        if method != "__call__" or function not in _GRADIENTS:
            return NotImplemented
        values = [value_of(operand) for operand in operands]
        output = function(*values)
        parents = []
        for operand, slope in zip(operands, _GRADIENTS[function], strict=True):
            if isinstance(operand, Variable):
                parents.append((operand, _backward(slope, output, values)))
        return Variable(output, tuple(parents))

    def __getitem__(self, index: slice | npt.NDArray[np.intp]) -> Variable:
        """Returns a one-dimensional variable's entries at `index`. Indices may repeat."""

        def back(g: FloatArray) -> FloatArray:
            whole = np.zeros(len(self.value))
            np.add.at(whole, index, g)  # type: ignore[arg-type]
            return whole

        return Variable(self.value[index], ((self, back),))


#: Maps a numpy function to one gradient function per operand. A gradient function takes the
#: output's gradient g, the output and all operands, and returns its operand's gradient.
_GRADIENTS: dict[np.ufunc, tuple[Callable[..., FloatArray], ...]] = {
    np.add: (lambda g, out, a, b: g, lambda g, out, a, b: g),
    np.subtract: (lambda g, out, a, b: g, lambda g, out, a, b: -g),
    np.multiply: (lambda g, out, a, b: g * b, lambda g, out, a, b: g * a),
    np.divide: (lambda g, out, a, b: g / b, lambda g, out, a, b: -g * out / b),
    # The gradient of a maximum or minimum flows to the operand that it selects.
    np.maximum: (lambda g, out, a, b: g * (a >= b), lambda g, out, a, b: g * (a < b)),
    np.minimum: (lambda g, out, a, b: g * (a <= b), lambda g, out, a, b: g * (a > b)),
    np.exp: (lambda g, out, x: g * out,),
    np.log: (lambda g, out, x: g / x,),
}


def _backward(slope: Callable[..., FloatArray], output: FloatArray, values: list[Any]) -> Back:
    """Returns a gradient function of `_GRADIENTS` as a function of the output's gradient only."""
    return lambda g: slope(g, output, *values)


def value_of(operand: Any) -> Any:
    """Returns the plain array of a Variable; other operands are returned unchanged."""
    return operand.value if isinstance(operand, Variable) else operand


def sigmoid(x: Any) -> Any:
    """Computes 1 / (1 + exp(-x)) without overflow."""
    out = 0.5 * (1.0 + np.tanh(0.5 * value_of(x)))
    if not isinstance(x, Variable):
        return out
    return Variable(out, ((x, lambda g: g * out * (1.0 - out)),))


def soft_plus(x: Any) -> Any:
    """Computes log(1 + exp(x)) without overflow."""
    value = value_of(x)
    out = np.maximum(value, 0.0) + np.log(1.0 + np.exp(-np.abs(value)))
    if not isinstance(x, Variable):
        return out
    return Variable(out, ((x, lambda g: g * sigmoid(value)),))


def soft_minimum(x: Any, width: Any) -> Any:
    """Computes -width · log(sum(exp(-x / width))) over the first axis of x, (kernels, rows).

    The result is a smooth minimum, at most width · log(kernels) below the true minimum.

    x, width: either both Variables, or both plain arrays or numbers.
    """
    w = value_of(width)
    scaled = value_of(x) * (-1.0 / w)
    top = scaled.max(axis=0)
    weights = np.exp(np.maximum(scaled - top, NEGLIGIBLE))
    total = weights.sum(axis=0)
    log_sum = top + np.log(total)
    out = -w * log_sum
    if not isinstance(x, Variable):
        return out
    weights /= total
    spread = (weights * scaled).sum(axis=0) - log_sum
    return Variable(out, ((x, lambda g: g * weights), (width, lambda g: g * spread)))


def _reduced(gradient: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """Sums a gradient over the axes along which its operand was broadcast."""
    while gradient.ndim > len(shape):
        gradient = gradient.sum(axis=0)
    repeated = tuple(i for i, size in enumerate(shape) if size == 1 and gradient.shape[i] != 1)
    return gradient.sum(axis=repeated, keepdims=True) if repeated else gradient


def gradient(output: Variable, source: Variable, seed: FloatArray) -> FloatArray:
    """Computes the gradient of sum(seed · output) with respect to `source`.

    seed: weight of each entry of `output`, in the shape of `output`.

    The result is zero if `output` does not depend on `source`.
    """
    order: list[Variable] = []
    seen: set[int] = set()
    stack: list[tuple[Variable, bool]] = [(output, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            for parent, _ in node.parents:
                stack.append((parent, False))
    output.gradient = seed
    for node in reversed(order):
        flow = node.gradient
        if flow is None:
            continue
        for parent, back in node.parents:
            part = _reduced(np.asarray(back(flow)), np.shape(parent.value))
            if parent.gradient is not None:
                part = parent.gradient + part
            parent.gradient = part
        if node is not source:
            node.gradient = None
    result = source.gradient
    source.gradient = None
    return np.zeros_like(source.value) if result is None else result
