"""Writes expressions that `trace` has recorded as JavaScript text.

There are two ways. `module` writes numpy expressions of the cost models. A row, which is one number
per shape, becomes a JavaScript constant. A vector, which is one number per kernel of a menu, is
computed in a loop. If a sum or an extreme of a vector is needed to compute another vector, the
second vector gets another loop after the first one. `Script` writes plain Python code, whose
conditions become conditional expressions.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quantbench.errors import InputError
from quantbench.explore.trace import MARKED, Node, as_node, in_order, ways

_EXPRESSIONS = {
    "absolute": "Math.abs({})",
    "add": "({} + {})",
    "bitwise_and": "({} & {})",
    "bit_length": "(32 - Math.clz32({}))",
    "bitwise_or": "({} | {})",
    "ceil": "Math.ceil({})",
    "divide": "({} / {})",
    "equal": "+({} === {})",
    "exp": "Math.exp({})",
    "floor": "Math.floor({})",
    "floor_divide": "Math.floor({} / {})",
    "greater": "+({} > {})",
    "greater_equal": "+({} >= {})",
    "left_shift": "({} << {})",
    "less": "+({} < {})",
    "less_equal": "+({} <= {})",
    "log": "Math.log({})",
    "log2": "Math.log2({})",
    "lowest_bit": "({0} & -{0})",  # for whole numbers below 2^31
    "maximum": "Math.max({}, {})",
    "minimum": "Math.min({}, {})",
    "multiply": "({} * {})",
    "negative": "(-{})",
    "not_equal": "+({} !== {})",
    "power": "({} ** {})",
    "remainder": "({0} - {1} * Math.floor({0} / {1}))",
    "round": "roundEven({})",
    "sqrt": "Math.sqrt({})",
    "subtract": "({} - {})",
    "tanh": "Math.tanh({})",
    "where": "({} ? {} : {})",
}
# Reductions that a loop accumulates, as (initial value of the result r, statement that updates r
# with an entry x).
_CARRIED = {
    "max": ("-Infinity", "if ({x} > {r}) {r} = {x};"),
    "min": ("Infinity", "if ({x} < {r}) {r} = {x};"),
    "sum": ("0", "{r} += {x};"),
}
# Reductions that read a stored vector v after its loop has ended.
_READ = {"argmin": "argmin({v})", "smallest": "smallest({v}, {n})"}
# Pattern of the mark that `Node.__str__` writes for a node in a text.
_MARK = "\0(\\d+)\0"
# In a `Script`, expressions with more characters than this become separate functions.
_LONG = 120


def number(value: float) -> str:
    """Returns a number as JavaScript text."""
    if value < 0:
        return f"(-{number(-value)})"
    if np.isinf(value):
        return "Infinity"
    if value == int(value) and value < 2**53:
        return repr(int(value))
    return repr(float(value))


def module(functions: Mapping[str, tuple[Sequence[str], Sequence[Any]]]) -> str:
    """Returns the body of a JavaScript function that returns an object with the given functions.

    functions: (names of the arguments, outputs) of each function, by its name. A function returns
        an array with the values of its outputs, which are nodes or numbers.
    """
    made: list[str] = []
    bodies = []
    for name, (arguments, outputs) in functions.items():
        text = _Function(outputs, made).text
        bodies.append(f"{name}({', '.join(arguments)}) {{\n{text}\n}}")
    return "\n".join(["'use strict';", *made, "return {", ",\n".join(bodies), "};"])


class _Function:
    """Writes the body of one JavaScript function as `text`.

    outputs: expressions whose values the function returns.
    made: declarations of constant tables and stored vectors, which precede all functions. This
        function appends its declarations.
    """

    def __init__(self, outputs: Sequence[Any], made: list[str]) -> None:
        wanted = list(map(as_node, outputs))
        order = in_order(wanted)
        self._made = made
        self._names: dict[Node, str] = {}
        self._stored: dict[Node, str] = {}
        self._levels: dict[Node, int] = {}
        # The level of a node is the number of loops that must end before it can be computed. A row
        # that depends on a vector, such as its sum, is one level above this vector.
        for node in order:
            level = 0
            of_vectors = False
            for arg in node.args:
                level = max(level, self._levels[arg])
                of_vectors = of_vectors or arg.kernels > 0
            self._levels[node] = level + (of_vectors and not node.kernels)
        # A vector that is read after its loop has ended must be stored. A sum or an extreme does
        # not read it later, because the loop itself accumulates them.
        for node in order:
            for arg in node.args:
                later = self._levels[arg] < self._levels[node]
                if arg.kernels and arg.op != "constant" and later and node.op not in _CARRIED:
                    self._store(arg)
        self._lines: list[str] = []
        computed = [node for node in order if node.op not in ("input", "constant", "some", "sort")]
        for level in range(max(self._levels.values(), default=0) + 1):
            self._level(level, computed)
        self._lines.append(f"return [{', '.join(map(self._value, wanted))}];")
        self.text = "\n".join(self._lines)

    def _store(self, node: Node) -> None:
        """Declares an array that keeps the entries of a vector for later loops."""
        if node not in self._stored:
            self._stored[node] = f"v{len(self._made)}"
            self._made.append(f"const v{len(self._made)} = new Float64Array({node.kernels});")

    def _value(self, node: Node, level: int | None = None) -> str:
        """Returns the JavaScript text that reads the value of a node.

        level: level of the loop in which the text stands; None outside all loops.
        """
        if node.op == "input":
            return str(node.value)
        if node.op == "constant" and not node.kernels:
            return number(float(node.value[0]))
        if node.op == "constant":
            if node not in self._names:
                self._names[node] = f"k{len(self._made)}"
                table = ", ".join(map(number, node.value.tolist()))
                self._made.append(f"const k{len(self._made)} = Float64Array.of({table});")
            return f"{self._names[node]}[i]"
        if node.kernels and level is not None and self._levels[node] < level:
            return f"{self._stored[node]}[i]"
        return self._names[node]

    def _level(self, level: int, computed: Sequence[Node]) -> None:
        """Adds the code of a level: its rows, and then a loop that computes its vectors.

        The loop also accumulates the sums and extremes of these vectors.

        computed: all nodes that need code, operands first.
        """
        vectors = []
        for node in computed:
            if self._levels[node] != level:
                continue
            if node.kernels:
                vectors.append(node)
            elif node.op not in _CARRIED:
                self._names[node] = f"r{len(self._names)}"
                text = self._expression(node, level)
                self._lines.append(f"const {self._names[node]} = {text};")
        loop: list[str] = []
        for node in vectors:
            name = self._names[node] = f"x{len(self._names)}"
            loop.append(f"const {name} = {self._expression(node, level)};")
            if node in self._stored:
                loop.append(f"{self._stored[node]}[i] = {name};")
        for node in computed:
            if node.op in _CARRIED and self._levels[node] == level + 1:
                first, step = _CARRIED[node.op]
                name = self._names[node] = f"r{len(self._names)}"
                self._lines.append(f"let {name} = {first};")
                loop.append(step.format(r=name, x=self._value(node.args[0], level)))
                vectors.append(node.args[0])
        if loop:
            count = max(node.kernels for node in vectors)
            self._lines += [f"for (let i = 0; i < {count}; i++) {{", *loop, "}"]

    def _expression(self, node: Node, level: int) -> str:
        """Returns the JavaScript text that computes a node from its arguments.

        level: level of the code in which the text stands.
        """
        if node.op in _READ:
            return _READ[node.op].format(v=self._stored[node.args[0]], n=node.value)
        if node.op == "least_of":
            name = self._stored[node.args[0]]
            entries = (f"{name}[{i}]" for i in node.value)
            return f"Math.min({', '.join(entries)})"
        arguments = [self._value(arg, level) for arg in node.args]
        if node.op == "call":
            return f"{node.value}([{', '.join(arguments)}])"
        if node.op == "item":
            return f"{arguments[0]}[{node.value}]"
        return _EXPRESSIONS[node.op].format(*arguments)


class Script:
    """Writes plain Python code as JavaScript functions of one argument s, an object of sizes.

    Long expressions become separate functions, which equal expressions share. `str(script)` is the
    body of a JavaScript function that returns an object with all functions.

    given: conditions with a known outcome.
    """

    def __init__(self, given: Mapping[Node, bool]) -> None:
        self._given = given
        self._helpers: dict[str, str] = {}
        self._functions: dict[str, str] = {}
        self._texts: dict[Node, str] = {}

    def add(
        self,
        name: str,
        function: Callable[[], Any],
        refused: Callable[[InputError], Any] | None = None,
    ) -> None:
        """Adds a function to the script.

        name: name of the JavaScript function.
        function: Python function without arguments, which computes its result from symbols.
        refused: function that maps an InputError to the result; for None, see `trace.ways`.
        """
        self._functions[name] = ways(
            lambda: self._named(self._text(function())),
            lambda condition, yes, no: self._joined(self._text(condition), yes, no),
            refused and (lambda error: self._text(refused(error))),
            self._given,
        )

    def __str__(self) -> str:
        named = [f"const {name} = s => {text};" for text, name in self._helpers.items()]
        functions = ",\n".join(f"{name}: s => {text}" for name, text in self._functions.items())
        return "\n".join(["'use strict';", *named, f"return {{{functions}}};"])

    def _joined(self, condition: str, yes: str, no: str) -> str:
        """Returns a conditional expression; `yes` if both outcomes have the same text."""
        return yes if yes == no else self._named(f"({condition} ? {yes} : {no})")

    def _named(self, text: str) -> str:
        """Returns a short expression unchanged.

        A long expression becomes the body of a function, and a call of this function is returned.
        """
        if len(text) <= _LONG:
            return text
        return f"{self._helpers.setdefault(text, f'f{len(self._helpers)}')}(s)"

    def _text(self, value: Any) -> str:
        """Returns a value as JavaScript text.

        value: a node, a string with marks of nodes, a number, or a list or dictionary of values.
        """
        if isinstance(value, Node):
            if value not in self._texts:
                self._texts[value] = self._named(self._node(value))
            return self._texts[value]
        if isinstance(value, str):
            return f"`{re.sub(_MARK, self._marked, value)}`"
        if isinstance(value, dict):
            items = [f"{name}: {self._text(one)}" for name, one in value.items()]
            return self._named(f"({{{', '.join(items)}}})")
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._text, value))}]"
        return str(value).lower() if isinstance(value, bool) else number(value)

    def _marked(self, mark: re.Match[str]) -> str:
        """Returns the placeholder of a JavaScript template string for a marked node."""
        return f"${{{self._text(MARKED[int(mark[1])])}}}"

    def _node(self, node: Node) -> str:
        """Returns the JavaScript text of a node, with the texts of its operands inside."""
        if node.op == "input":
            return str(node.value)
        if node.op == "constant":
            return number(float(node.value[0]))
        return _EXPRESSIONS[node.op].format(*map(self._text, node.args))
