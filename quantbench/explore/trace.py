"""Records the computations of Python code as expressions, which `javascript` writes as JavaScript.

The code of `latency` runs unchanged on nodes (symbolic arrays), because numpy passes calls of its
functions on to them (NEP 13 and NEP 18). A node is a row (one number per shape) or a vector (one
number per kernel of a menu). Reductions over the first axis turn vectors into rows. Plain Python
code with conditions on nodes runs once for each combination of outcomes (`ways`).
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
    """A symbolic array: the result of an operation on other nodes.

    The same operation on the same nodes gives the same node object.

    op: name of the operation, mostly that of the numpy function.
    args: operands, which are nodes.
    kernels: length of a vector; 0 for a row.
    value: values of a constant. For other operations, the argument that is not a node (`extra` of
        `Node.of`).
    kind: class that `isinstance` sees.
    """

    op: str
    args: tuple[Any, ...]
    kernels: int
    value: Any = None
    kind: type = int

    @staticmethod
    def of(op: str, *args: Any, kernels: int | None = None, extra: Any = None) -> Node:
        """Returns the node of an operation.

        args: operands: nodes, numbers or arrays.
        kernels: length of the result; default that of the longest operand.
        extra: argument that is not a node: an index or indices into a vector, or the name of a
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
        """Records an element-wise numpy function, such as `np.exp` or an operator (NEP 13)."""
        name = ufunc.__name__
        if method != "__call__" or options:
            return NotImplemented
        # x & -x is the largest power of two that divides x.
        if name == "bitwise_and" and args[1] is -args[0]:
            return Node.of("lowest_bit", args[0])
        # Only truth values (0 or 1) are inverted.
        if name == "invert":
            return Node.of("subtract", 1.0, *args)
        if name == "power" and args[1] == 3:
            return args[0] * args[0] * args[0]
        return Node.of(name, *args)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        """Records any other numpy function, such as `np.where` (NEP 18)."""
        return _FUNCTIONS[function.__name__](*args, **options)

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        # A conversion to integers truncates. Sizes are positive, so rounding down does the same.
        return np.floor(self) if np.issubdtype(dtype, np.integer) else self

    def any(self) -> bool:
        return True  # a condition on a node holds for some shapes

    def min(self, axis: int) -> Node:
        if self.op == "some":
            return Node.of("least_of", *self.args, kernels=0, extra=self.value)
        return self._reduce("min")

    def _reduce(self, op: str, axis: int = 0) -> Node:
        """Records a reduction of a vector to a row."""
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
        """Returns the known outcome of a condition; `ways` provides it."""
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
        """Records a result of a call, an entry of a sorted vector, or some entries of a vector."""
        if self.op == "call":
            return Node.of("item", self, extra=int(index))
        if self.op == "sort":  # numpy.sort(x.T, axis=1)[:, i]
            return Node.of("smallest", *self.args, kernels=0, extra=int(index[1]))
        rows = tuple(np.arange(self.kernels)[index].tolist())
        return Node.of("some", self, extra=rows)


_KNOWN: dict[Any, Node] = {}
#: Marked nodes, by the number in their mark (see `Node.__str__`).
MARKED: dict[int, Node] = {}
# Known outcomes of conditions, as a stack: the last entry belongs to the run in progress.
_DECIDED: list[dict[Node, bool]] = [{}]


class _Undecided(BaseException):
    """Raised at a condition with an unknown outcome. `ways` catches it and tries both outcomes."""


def ways(
    function: Callable[[], Any],
    join: Callable[[Node, Any, Any], Any],
    refused: Callable[[InputError], Any] | None = None,
    given: Mapping[Node, bool] | None = None,
) -> Any:
    """Runs a function for every combination of its conditions' outcomes, and joins the results.

    function: function without arguments, whose conditions depend on nodes.
    join: function that makes one result from a condition, the result if it is true, and the result
        if it is false.
    refused: function that maps an InputError of `function` to a result. With None, an outcome that
        leads to an InputError is taken to be impossible, and the result of the other outcome is
        used.
    given: conditions with a known outcome.
    """
    settled = dict(given or {})

    # Runs the function with the given outcomes. At a further condition, tries both outcomes.
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
        # If an outcome is impossible, the condition has the other outcome in all further runs. This
        # does not apply to a plain input (a flag), which can have both outcomes elsewhere.
        if None in results:
            if condition.op != "input":
                settled[condition] = results[1] is None
            return results[0] or results[1]
        return join(condition, *results)

    return follow({})


def as_node(value: Any) -> Node:
    """Returns a node unchanged, and a number or an array as a constant node."""
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
    """Returns input nodes, which are rows: one number per shape.

    names: JavaScript expressions that read the inputs.
    """
    return [Node.of("input", kernels=0, extra=name) for name in names]


def flag(name: str) -> Node:
    """Returns an input node that is true or false; `name` is as in `inputs`."""
    (found,) = inputs(name)
    found.kind = bool
    return found


def call(name: str, arguments: Sequence[Any], results: int) -> list[Node]:
    """Records a call of one of the page's JavaScript functions, and returns its results as nodes.

    arguments: nodes or numbers, which the function gets as one array.
    results: number of results, which the function returns as one array.
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
