"""Records numpy expressions symbolically, so that the cost models can be written as JavaScript.

The code of `latency` runs unchanged on nodes: numpy dispatches its functions to them (NEP 13 and
NEP 18). A node is a row (one number per shape) or a vector (one number per kernel of a menu), and
reductions over the first axis turn vectors into rows. Plain Python code with conditions on nodes
runs once for each combination of outcomes (`ways`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from quantbench.errors import InputError


@dataclass(eq=False, repr=False)
class Node(NDArrayOperatorsMixin):
    """A symbolic array: an operation on other nodes. Equal operations on equal nodes are one node.

    kernels: length of a vector; 0 for a row.
    value: value of a constant. For other operations, an argument that is not a node.
    kind: type that `isinstance` sees.
    """

    op: str
    args: tuple[Any, ...]
    kernels: int
    value: Any = None
    kind: type = int

    @staticmethod
    def of(op: str, *args: Any, kernels: int | None = None, extra: Any = None) -> Node:
        """Returns the node of an operation.

        kernels: length of the result. The default is the longest argument.
        extra: an argument that is not a node: an index or indices into a vector, or the name of a
            function or an input.
        """
        nodes = tuple(map(as_node, args))
        key = (op, tuple(map(id, nodes)), extra)
        if key not in _KNOWN:
            if kernels is None:
                kernels = max([node.kernels for node in nodes], default=0)
            _KNOWN[key] = Node(op, nodes, kernels, extra)
        return _KNOWN[key]

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **options: Any) -> Any:
        name = ufunc.__name__
        if method != "__call__" or options:
            return NotImplemented
        # x & -x is the largest power of two that divides x.
        if name == "bitwise_and" and args[1] is -args[0]:
            return Node.of("lowest_bit", args[0])
        # Only truth values are inverted, which are 0 or 1.
        if name == "invert":
            return Node.of("subtract", 1.0, *args)
        if name == "power" and args[1] == 3:
            return args[0] * args[0] * args[0]
        return Node.of(name, *args)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return _FUNCTIONS[function.__name__](*args, **options)

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        # Sizes are positive, so rounding down equals truncation.
        return np.floor(self) if np.issubdtype(dtype, np.integer) else self

    def any(self) -> bool:
        return True  # the condition holds for some shapes

    def min(self, axis: int) -> Node:
        if self.op == "some":
            return Node.of("least_of", *self.args, kernels=0, extra=self.value)
        return self._reduce("min")

    def _reduce(self, op: str, axis: int = 0) -> Node:
        return Node.of(op, self, kernels=0)

    max = partialmethod(_reduce, "max")
    sum = partialmethod(_reduce, "sum")
    argmin = partialmethod(_reduce, "argmin")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.kernels, 1) if self.kernels else (1,)

    T = property(lambda self: self)
    __class__ = property(lambda self: self.kind)
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        if self not in _DECIDED[-1]:
            raise _Undecided(self)
        return _DECIDED[-1][self]

    def __str__(self) -> str:
        """Returns a mark by which `javascript` finds the node in a text."""
        MARKED[id(self)] = self
        return f"\0{id(self)}\0"

    def __format__(self, form: str) -> str:
        return str(self)

    __repr__ = __str__

    def __round__(self) -> Node:
        return Node.of("round", self)

    def bit_length(self) -> Node:
        return Node.of("bit_length", self)

    def __len__(self) -> int:
        return self.kernels or 1

    def __getitem__(self, index: Any) -> Node:
        if self.op == "call":
            return Node.of("item", self, extra=int(index))
        if self.op == "sort":  # numpy.sort(x.T, axis=1)[:, i]
            return Node.of("smallest", *self.args, kernels=0, extra=int(index[1]))
        rows = tuple(np.arange(self.kernels)[index].tolist())
        return Node.of("some", self, extra=rows)


_KNOWN: dict[Any, Node] = {}
#: Maps the number between the zero characters of a mark to the node.
MARKED: dict[int, Node] = {}
# Known outcomes of conditions; the last entry belongs to the run in progress.
_DECIDED: list[dict[Node, bool]] = [{}]


class _Undecided(BaseException):
    """Raised at a condition whose outcome is unknown, so that both outcomes are followed."""


def ways(
    function: Callable[[], Any],
    join: Callable[[Node, Any, Any], Any],
    refused: Callable[[InputError], Any] | None = None,
    given: Mapping[Node, bool] | None = None,
) -> Any:
    """Runs a function for every combination of outcomes of its conditions, and joins the results.

    join: makes one result from a condition, the result where the condition holds, and the result
        where it does not.
    refused: makes a result from an InputError that the function raises. With None, a path
        that raises is taken to be unreachable: the last condition before it is assumed to have its
        other outcome for every shape.
    given: known outcomes of conditions.
    """
    settled = dict(given or {})

    # Runs the function with these outcomes; at a further condition, follows both outcomes.
    def follow(outcomes: dict[Node, bool]) -> Any:
        _DECIDED.append(settled | outcomes)
        try:
            return function()
        except _Undecided as met:
            condition: Node = met.args[0]
        except InputError as error:
            return refused and refused(error)
        finally:
            _DECIDED.pop()
        results = [follow({**outcomes, condition: outcome}) for outcome in (True, False)]
        # If no shape has one outcome of a condition, the condition is settled and need not be
        # followed again. A plain input (a flag) is not settled, because it can have both outcomes.
        if None in results:
            if condition.op != "input":
                settled[condition] = results[1] is None
            return results[0] or results[1]
        return join(condition, *results)

    return follow({})


def as_node(value: Any) -> Node:
    """Returns a node as it is, and a number or an array as a constant node."""
    if isinstance(value, Node):
        return value
    array = np.asarray(value, dtype=np.float64)
    key = ("constant", array.tobytes())
    if key not in _KNOWN:
        _KNOWN[key] = Node("constant", (), array.size if array.size > 1 else 0, array.ravel())
    return _KNOWN[key]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "where": partial(Node.of, "where"),
    "broadcast_to": lambda x, shape: x,
    "clip": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "einsum": lambda _, a, b: Node.of("multiply", a, b).sum(axis=0),
    "sort": lambda x, axis: Node.of("sort", x),
    "column_stack": list,
    "round": lambda x, decimals: np.floor(x * 10.0**decimals + 0.5) / 10.0**decimals,
}


def inputs(*names: str) -> list[Node]:
    """Returns input nodes, each of which is one number per shape."""
    return [Node.of("input", kernels=0, extra=name) for name in names]


def flag(name: str) -> Node:
    """Returns an input node that is true or false."""
    (found,) = inputs(name)
    found.kind = bool
    return found


def call(name: str, arguments: Sequence[Any], results: int) -> list[Node]:
    """Records the call of a JavaScript function of the page, and returns its results as nodes.

    arguments: numbers that the function gets as a list.
    results: number of results that it returns.
    """
    made = Node.of("call", *arguments, extra=name)
    return [made[i] for i in range(results)]


def in_order(wanted: Sequence[Node]) -> list[Node]:
    """Returns all nodes that the wanted nodes depend on, operands first."""
    done: dict[Node, None] = {}
    stack = list(reversed(wanted))
    while stack:
        missing = [arg for arg in stack[-1].args if arg not in done]
        stack += reversed(missing)
        if not missing:
            done[stack.pop()] = None
    return list(done)
