"""Computes reverse-mode gradients of numpy expressions, for the operations of the GEMM cost model.

With plain arrays the operations return plain arrays; with a `Variable` they also record the
backward function, so that the cost model is written once.

>>> x = Variable(np.array([2.0, 3.0]))
>>> y = exp(x * 2.0) + x
>>> gradient(y, x, np.ones(2)) == 2.0 * np.exp([4.0, 6.0]) + 1.0
array([ True,  True])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
#: smallest exponent: e^-50 is about 1e-22, and avoids denormal numbers, which are slow
NEGLIGIBLE = -50.0

Back = Callable[[FloatArray], FloatArray]


class Variable:
    """Array that records its operands. parents: (operand, function from own gradient to the
    operand's) pairs.
    """

    __slots__ = ("gradient", "parents", "value")
    __array_ufunc__ = None  # numpy must leave `array * variable` to __rmul__

    def __init__(self, value: FloatArray, parents: tuple[tuple[Variable, Back], ...] = ()) -> None:
        self.value = value
        self.parents = parents
        self.gradient: FloatArray | None = None

    def __add__(self, other: Operand) -> Variable:
        return _binary(np.add, self, other, lambda g, a, b, o: g, lambda g, a, b, o: g)

    __radd__ = __add__

    def __sub__(self, other: Operand) -> Variable:
        return _binary(np.subtract, self, other, lambda g, a, b, o: g, lambda g, a, b, o: -g)

    def __rsub__(self, other: Operand) -> Variable:
        return _binary(np.subtract, other, self, lambda g, a, b, o: g, lambda g, a, b, o: -g)

    def __mul__(self, other: Operand) -> Variable:
        return _binary(np.multiply, self, other, lambda g, a, b, o: g * b, lambda g, a, b, o: g * a)

    __rmul__ = __mul__

    def __truediv__(self, other: Operand) -> Variable:
        return _binary(
            np.divide, self, other, lambda g, a, b, o: g / b, lambda g, a, b, o: -g * o / b
        )

    def __rtruediv__(self, other: Operand) -> Variable:
        return _binary(
            np.divide, other, self, lambda g, a, b, o: g / b, lambda g, a, b, o: -g * o / b
        )

    def take(self, index: slice | npt.NDArray[np.intp]) -> Variable:
        """Returns entries of a one-dimensional variable; indices may repeat."""
        size = len(self.value)

        def back(g: FloatArray) -> FloatArray:
            whole = np.zeros(size)
            np.add.at(whole, index, g)  # type: ignore[arg-type]
            return whole

        return Variable(self.value[index], ((self, back),))


Operand = Variable | FloatArray | float


def value_of(operand: Any) -> Any:
    """Returns the plain array or number of an operand."""
    return operand.value if isinstance(operand, Variable) else operand


def _binary(function: Any, a: Operand, b: Operand, to_a: Any, to_b: Any) -> Variable:
    x, y = value_of(a), value_of(b)
    out = function(x, y)
    parents: list[tuple[Variable, Back]] = []
    if isinstance(a, Variable):
        parents.append((a, lambda g: to_a(g, x, y, out)))
    if isinstance(b, Variable):
        parents.append((b, lambda g: to_b(g, x, y, out)))
    return Variable(out, tuple(parents))


def exp(x: Any) -> Any:
    if not isinstance(x, Variable):
        return np.exp(x)
    out = np.exp(x.value)
    return Variable(out, ((x, lambda g: g * out),))


def log(x: Any) -> Any:
    if not isinstance(x, Variable):
        return np.log(x)
    value = x.value
    return Variable(np.log(value), ((x, lambda g: g / value),))


def sigmoid(x: Any) -> Any:
    """Computes 1 / (1 + exp(-x)) without overflow."""
    out = 0.5 * (1.0 + np.tanh(0.5 * value_of(x)))
    return (
        Variable(out, ((x, lambda g: g * out * (1.0 - out)),)) if isinstance(x, Variable) else out
    )


def soft_plus(x: Any) -> Any:
    """Computes log(1 + exp(x)) without overflow."""
    value = value_of(x)
    out = np.maximum(value, 0.0) + np.log(1.0 + np.exp(-np.abs(value)))
    return Variable(out, ((x, lambda g: g * sigmoid(value)),)) if isinstance(x, Variable) else out


def maximum(a: Any, b: Any) -> Any:
    """Computes the elementwise maximum; the gradient flows to the larger operand."""
    if not isinstance(a, Variable) and not isinstance(b, Variable):
        return np.maximum(a, b)
    return _binary(
        np.maximum, a, b, lambda g, x, y, o: g * (x >= y), lambda g, x, y, o: g * (x < y)
    )


def minimum(a: Any, b: Any) -> Any:
    """Computes the elementwise minimum; the gradient flows to the smaller operand."""
    if not isinstance(a, Variable) and not isinstance(b, Variable):
        return np.minimum(a, b)
    return _binary(
        np.minimum, a, b, lambda g, x, y, o: g * (x <= y), lambda g, x, y, o: g * (x > y)
    )


def soft_minimum(x: Any, width: Any) -> Any:
    """Computes -width · log(sum(exp(-x / width))) over the first axis of x, (kernels, rows).

    The result is at most width · log(kernels) below the minimum."""
    value, w = value_of(x), value_of(width)
    scaled = value * (-1.0 / w)
    top = scaled.max(axis=0)
    weights = np.exp(np.maximum(scaled - top, NEGLIGIBLE))
    total = weights.sum(axis=0)
    log_sum = top + np.log(total)
    out = -w * log_sum
    parents: list[tuple[Variable, Back]] = []
    if isinstance(x, Variable) or isinstance(width, Variable):
        weights /= total
    if isinstance(x, Variable):
        parents.append((x, lambda g: g * weights))
    if isinstance(width, Variable):
        spread = (weights * scaled).sum(axis=0) - log_sum
        parents.append((width, lambda g: g * spread))
    return Variable(out, tuple(parents)) if parents else out


def _reduced(gradient: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """Sums a gradient over the axes along which its operand was broadcast."""
    while gradient.ndim > len(shape):
        gradient = gradient.sum(axis=0)
    repeated = tuple(i for i, size in enumerate(shape) if size == 1 and gradient.shape[i] != 1)
    return gradient.sum(axis=repeated, keepdims=True) if repeated else gradient


def gradient(output: Variable, source: Variable, seed: FloatArray) -> FloatArray:
    """Computes the gradient of sum(seed · output) with respect to `source`; zeros if `output` does
    not depend on it.
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
            stack.extend((parent, False) for parent, _ in node.parents)
    output.gradient = seed
    for node in reversed(order):
        flow = node.gradient
        if flow is None:
            continue
        for parent, back in node.parents:
            part = _reduced(np.asarray(back(flow)), np.shape(parent.value))
            parent.gradient = part if parent.gradient is None else parent.gradient + part
        if node is not source:
            node.gradient = None
    result = source.gradient
    source.gradient = None
    return np.zeros_like(source.value) if result is None else result
