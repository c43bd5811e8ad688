"""Compiles recorded expressions (`trace`) to a WebAssembly module, two kernels of a menu at a time.

Entry points: `Module`, with `add` and `to_bytes`. Used by `evaluator`.

Every value is a pair of doubles (SIMD type f64x2): two neighbouring entries of a vector, or a row's number twice. The
module holds its constants and results in its memory; a function writes its outputs as doubles from address 0 on.
Binary format and opcodes: WebAssembly Core Specification 2.0, https://www.w3.org/TR/wasm-core-2/ (chapter 5).
exp and log are evaluated by polynomials to the last bits of a double.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import factorial, log
from typing import Any

import numpy as np

from quantbench.explore.trace import Node, as_node, in_order

_F64, _V128, _I32 = b"\x7c", b"\x7b", b"\x7f"
_SIMD = {
    "load": 0x00, "load_splat": 0x0A, "store": 0x0B, "const": 0x0C, "shuffle": 0x0D, "splat": 0x14, "extract": 0x21,
    "equal": 0x47, "not_equal": 0x48, "less": 0x49, "greater": 0x4A, "less_equal": 0x4B, "greater_equal": 0x4C,
    "and": 0x4E, "or": 0x50, "select": 0x52, "ceil": 0x74, "floor": 0x75, "negate_whole": 0xC1, "shift_left": 0xCB,
    "shift_right": 0xCD, "add_whole": 0xCE, "subtract_whole": 0xD1, "absolute": 0xEC, "negative": 0xED, "sqrt": 0xEF,
    "add": 0xF0, "subtract": 0xF1, "multiply": 0xF2, "divide": 0xF3, "minimum": 0xF4, "maximum": 0xF5,
}  # fmt: skip
_COMPARED = ("equal", "not_equal", "less", "greater", "less_equal", "greater_equal")
# numpy's functions that are one instruction
_PLAIN = {name for name in _SIMD if isinstance(getattr(np, name, None), np.ufunc)} - {*_COMPARED}
_REDUCED = {"min": "minimum", "max": "maximum", "sum": "add"}
_START = {"min": np.inf, "max": -np.inf, "sum": 0.0}
#: reductions that read a stored vector
_AT_ONCE = ("argmin", "smallest", "least_of")
_EXP, _LOG = 0, 1  # indices of the functions that every module begins with
_MAGIC = 2.0**52
_PAGE_BYTES = 65536


def _number(value: int) -> bytes:
    """Encodes an unsigned integer (LEB128)."""
    out = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        out.append(low | (0x80 if value else 0))
        if not value:
            return bytes(out)


def _signed(value: int) -> bytes:
    """Encodes a signed integer (LEB128)."""
    out = bytearray()
    while True:
        low, value = value & 0x7F, value >> 7
        done = (value == 0 and not low & 0x40) or (value == -1 and low & 0x40)
        out.append(low | (0 if done else 0x80))
        if done:
            return bytes(out)


def _simd(name: str) -> bytes:
    return b"\xfd" + _number(_SIMD[name])


def _memory(opcode: bytes, address: int) -> bytes:
    return opcode + b"\x00" + _number(address)


def _pair(value: float) -> bytes:
    return _simd("const") + 2 * struct.pack("<d", value)


def _bits(value: int) -> bytes:
    return _simd("const") + 2 * struct.pack("<Q", value)


def _get(local: int) -> bytes:
    return b"\x20" + _number(local)


def _set(local: int) -> bytes:
    return b"\x21" + _number(local)


def _i32(value: int) -> bytes:
    return b"\x41" + _signed(value)


def _sized(content: bytes) -> bytes:
    return _number(len(content)) + content


def _vector(items: Sequence[bytes]) -> bytes:
    return _number(len(items)) + b"".join(items)


def _polynomial(local: int, coefficients: Sequence[float]) -> bytes:
    """Evaluates a polynomial of a local, highest coefficient first."""
    code = _pair(coefficients[0])
    for coefficient in coefficients[1:]:
        code += _get(local) + _simd("multiply") + _pair(coefficient) + _simd("add")
    return code


def _exp() -> bytes:
    """exp(x) = 2^k · exp(r): k is rounded by adding 1.5 · 2^52, whose low bits then hold it."""
    rounding = 1.5 * _MAGIC
    code = _get(0) + _pair(-708.0) + _simd("maximum") + _pair(709.0) + _simd("minimum") + _set(0)
    code += _get(0) + _pair(1 / log(2)) + _simd("multiply") + _pair(rounding) + _simd("add") + _set(1)
    for part in (0.6931471803691238, 1.9082149292705877e-10):  # ln 2 in two parts
        code += _get(0) + _get(1) + _pair(rounding) + _simd("subtract") + _pair(part) + _simd("multiply")
        code += _simd("subtract") + _set(0)
    code += _polynomial(0, [1 / factorial(i) for i in range(12, -1, -1)])
    code += _get(1) + _i32(52) + _simd("shift_left") + _bits(1023 << 52) + _simd("add_whole")
    return code + _simd("multiply")


def _log() -> bytes:
    """log(x) = e · ln 2 + 2 · atanh((f - 1) / (f + 1)), x = 2^e · f with f from √½ to √2."""
    half = struct.unpack("<Q", struct.pack("<d", 0.5**0.5))[0]
    # Exponent of x over √½, as a whole number; adding it to the bits of 2^52 makes it a double.
    code = _get(0) + _bits(half) + _simd("subtract_whole") + _bits(1023 << 52) + _simd("add_whole")
    code += (
        _i32(52) + _simd("shift_right") + _bits(0x433 << 52) + _simd("or") + _pair(_MAGIC + 1023) + _simd("subtract")
    )
    code += _set(1)
    code += _get(0) + _bits(half) + _simd("subtract_whole") + _bits((1 << 52) - 1) + _simd("and")
    code += _bits(half) + _simd("add_whole") + _set(0)
    code += _get(0) + _pair(1.0) + _simd("subtract") + _get(0) + _pair(1.0) + _simd("add") + _simd("divide") + _set(0)
    code += _get(0) + _get(0) + _simd("multiply") + _set(2)
    code += _polynomial(2, [2 / i for i in range(19, 0, -2)]) + _get(0) + _simd("multiply")
    return code + _get(1) + _pair(log(2)) + _simd("multiply") + _simd("add")


class Module:
    """A WebAssembly module under construction.

    results: doubles at the start of the memory that functions write their outputs to.
    """

    def __init__(self, results: int) -> None:
        self._end = 8 * (results + results % 2)
        self._tables: dict[int, int] = {}
        self._data: list[tuple[int, bytes]] = []
        self._types: list[tuple[bytes, bytes]] = [(_V128, _V128), (_V128, _V128)]
        self._bodies = [_vector([b"\x02" + _V128]) + _exp() + b"\x0b", _vector([b"\x02" + _V128]) + _log() + b"\x0b"]
        self._names: list[str] = []

    def add(self, name: str, arguments: Sequence[str], outputs: Sequence[Any], *, by_kernel: bool = False) -> None:
        """Adds a function of `arguments` (doubles) that writes the outputs.

        by_kernel: whether it has one more argument, the index (an integer) of the only entry of the vectors that is
            computed; outputs may then be vectors.
        """
        code = _Code(self, list(arguments), [as_node(output) for output in outputs], by_kernel)
        self._types.append((_F64 * len(arguments) + (_I32 if by_kernel else b""), b""))
        self._bodies.append(code.body)
        self._names.append(name)

    def reserve(self, count: int) -> int:
        """Reserves memory for a vector of doubles and returns its address."""
        address = self._end
        self._end += 8 * (count + count % 2)
        return address

    def table(self, node: Node) -> int:
        """Returns the address of a constant vector; an odd one ends with its last value twice."""
        if id(node) not in self._tables:
            values = np.asarray(node.value, dtype="<f8")
            address = self._tables[id(node)] = self.reserve(len(values))
            self._data.append((address, np.append(values, values[-1:] if len(values) % 2 else []).tobytes()))
        return self._tables[id(node)]

    def to_bytes(self) -> bytes:
        sections: list[tuple[int, bytes]] = [
            (1, _vector([b"\x60" + _vector([bytes([p]) for p in a]) + _vector([bytes([r]) for r in b])
                         for a, b in self._types])),
            (3, _vector([_number(i) for i in range(len(self._bodies))])),
            (5, b"\x01\x00" + _number(-(-self._end // _PAGE_BYTES))),
            (7, _vector([_sized(b"memory") + b"\x02\x00",
                         *(_sized(name.encode()) + b"\x00" + _number(2 + i) for i, name in enumerate(self._names))])),
            (10, _vector([_sized(body) for body in self._bodies])),
            (11, _vector([b"\x00" + _i32(address) + b"\x0b" + _sized(data) for address, data in self._data])),
        ]  # fmt: skip
        return b"\0asm\x01\0\0\0" + b"".join(bytes([number]) + _sized(content) for number, content in sections)


class _Code:
    """One function: rows are computed once, vectors in one loop per level of reductions."""

    def __init__(self, module: Module, arguments: list[str], outputs: list[Node], by_kernel: bool) -> None:
        self._module, self._arguments, self._by_kernel = module, arguments, by_kernel
        order = in_order(outputs)
        self._levels: dict[int, int] = {}
        for node in order:
            below = max((self._levels[id(arg)] for arg in node.args), default=0)
            self._levels[id(node)] = below + (node.op in (*_REDUCED, *_AT_ONCE))
        self._size = max((node.kernels for node in order), default=0)
        self._stored = {} if by_kernel else {id(node): module.reserve(self._size) for node in self._kept(order)}
        first = len(arguments) + by_kernel
        self._index = len(arguments) if by_kernel else first
        self._spare = first + (not by_kernel)  # ten doubles
        self._locals = {id(node): self._spare + 10 + i for i, node in enumerate(order)}
        declared = [b"\x01" + _I32] * (not by_kernel) + [b"\x0a" + _F64, _number(len(order)) + _V128]
        code = _get(self._index) + _i32(3) + b"\x74" + _set(self._index) if by_kernel else b""
        for level in range(max(self._levels.values(), default=0) + 1):
            code += self._level(level, [n for n in order if n.op not in ("input", "constant")])
        for i, node in enumerate(outputs):
            code += _i32(0) + self._value(node, 1 << 30) + _simd("extract") + b"\x00" + b"\x39\x03" + _number(8 * i)
        self.body = _vector(declared) + code + b"\x0b"

    def _kept(self, order: Sequence[Node]) -> list[Node]:
        """Returns the vectors that must be stored: read as a whole, or in a later loop."""
        kept = {}
        for node in order:
            for arg in node.args:
                later = node.kernels and self._levels[id(arg)] < self._levels[id(node)]
                if arg.kernels and arg.op != "constant" and (node.op in _AT_ONCE or later):
                    kept[id(arg)] = arg
        return list(kept.values())

    def _value(self, node: Node, level: int) -> bytes:
        if node.op == "input":
            return _get(self._arguments.index(str(node.value))) + _simd("splat")
        if node.op == "constant" and not node.kernels:
            return _pair(float(node.value[0]))
        load = _simd("load_splat" if self._by_kernel else "load")
        if node.op == "constant":
            return _get(self._index) + _memory(load, self._module.table(node))
        if node.kernels and not self._by_kernel and self._levels[id(node)] < level:
            return _get(self._index) + _memory(load, self._stored[id(node)])
        return _get(self._locals[id(node)])

    def _level(self, level: int, order: Sequence[Node]) -> bytes:
        """Returns the rows of a level, then the loop over its vectors with their reductions."""
        here = [node for node in order if self._levels[id(node)] == level]
        reduced = [node for node in order if self._levels[id(node)] == level + 1 and node.op in _REDUCED]
        code = b""
        for node in here:
            if not node.kernels and node.op not in _REDUCED:
                code += self._expression(node, level) + _set(self._locals[id(node)])
        vectors = [node for node in here if node.kernels and node.op not in ("some", "sort")]
        loop = b""
        for node in vectors:
            own = _get(self._locals[id(node)])
            loop += self._expression(node, level) + _set(self._locals[id(node)])
            if id(node) in self._stored:
                loop += _get(self._index) + own + _memory(_simd("store"), self._stored[id(node)])
        if self._by_kernel:
            return code + loop
        for node in reduced:
            place = self._locals[id(node)]
            value = self._value(node.args[0], level)
            if node.op == "sum" and self._size % 2:  # the last pair has one entry twice
                value += self._value(as_node(np.append(np.ones(self._size), [0.0])), level) + _simd("multiply")
            code += _pair(_START[node.op]) + _set(place)
            loop += _get(place) + value + _simd(_REDUCED[node.op]) + _set(place)
        if not loop:
            return code
        code += self._loop(loop, 16)
        for node in reduced:
            own, swap = _get(self._locals[id(node)]), _simd("shuffle") + bytes([*range(8, 16), *range(8)])
            code += own + own + own + swap + _simd(_REDUCED[node.op]) + _set(self._locals[id(node)])
        return code

    def _loop(self, code: bytes, step: int) -> bytes:
        """Repeats code with the index, bytes, from 0 to the end of the vectors."""
        end = 8 * (self._size + self._size % 2) if step == 16 else 8 * self._size
        index = self._index
        advance = _get(index) + _i32(step) + b"\x6a" + b"\x22" + _number(index) + _i32(end) + b"\x49"
        return _i32(0) + _set(index) + b"\x03\x40" + code + advance + b"\x0d\x00" + b"\x0b"

    def _expression(self, node: Node, level: int) -> bytes:
        op = node.op
        if op in _AT_ONCE:
            return self._read(node, level)
        args = [self._value(arg, level) for arg in node.args]
        code = b"".join(args)
        if op in _PLAIN:
            return code + _simd(op)
        if op in _COMPARED:
            return code + _simd(op) + _pair(1.0) + _simd("and")
        if op == "bitwise_or":  # of truth values, 0 or 1
            return code + _simd("maximum")
        if op == "bitwise_and":
            return code + _simd("minimum")
        if op == "invert":
            return _pair(1.0) + code + _simd("subtract")
        if op == "where":
            return args[1] + args[2] + args[0] + _pair(0.0) + _simd("not_equal") + _simd("select")
        if op == "exp":
            return code + _call(_EXP)
        if op in ("log", "log2"):
            return code + _call(_LOG) + (_pair(1 / log(2)) + _simd("multiply") if op == "log2" else b"")
        if op == "tanh":  # 1 - 2 / (exp(2x) + 1)
            once = code + _pair(2.0) + _simd("multiply") + _call(_EXP) + _pair(1.0) + _simd("add")
            return _pair(1.0) + _pair(2.0) + once + _simd("divide") + _simd("subtract")
        if op == "power":
            return args[0] + _call(_LOG) + args[1] + _simd("multiply") + _call(_EXP)
        if op == "remainder":
            quotient = args[0] + args[1] + _simd("divide") + _simd("floor")
            return args[0] + quotient + args[1] + _simd("multiply") + _simd("subtract")
        if op == "lowest_bit":  # of a whole number below 2^52
            whole = code + _pair(_MAGIC) + _simd("add") + _pair(_MAGIC) + _simd("subtract_whole")
            bit = whole + whole + _simd("negate_whole") + _simd("and")
            return bit + _pair(_MAGIC) + _simd("or") + _pair(_MAGIC) + _simd("subtract")
        raise AssertionError(f"no WebAssembly for {op}")

    def _read(self, node: Node, level: int) -> bytes:
        """Reads a stored vector: the least of some, the index of the least, or the n-th smallest."""
        address = self._stored[id(node.args[0])]
        load = b"\x2b\x03" + _number(address)
        if node.op == "least_of":
            reads = [_i32(8 * i) + load for i in node.value]
            return reads[0] + b"".join(read + b"\xa4" for read in reads[1:]) + _simd("splat")
        spare = self._spare
        if node.op == "argmin":
            better = _get(self._index) + load + _get(spare) + b"\x63" + b"\x04\x40"
            better += _get(self._index) + load + _set(spare) + _get(self._index) + b"\xb7" + _set(spare + 1) + b"\x0b"
            code = _double(np.inf) + _set(spare) + _double(0.0) + _set(spare + 1) + self._loop(better, 8)
            return code + _get(spare + 1) + _double(0.125) + b"\xa2" + _simd("splat")
        count = int(node.value) + 1
        code = b"".join(_double(np.inf) + _set(spare + i) for i in range(count))
        insert, value = _get(self._index) + load + _set(spare + 9), _get(spare + 9)
        for i in range(count):  # keeps the smallest ones in order
            own = _get(spare + i)
            insert += own + value + b"\xa5" + own + value + b"\xa4" + _set(spare + i) + _set(spare + 9)
        return code + self._loop(insert, 8) + _get(spare + count - 1) + _simd("splat")


def _call(function: int) -> bytes:
    return b"\x10" + _number(function)


def _double(value: float) -> bytes:
    return b"\x44" + struct.pack("<d", value)
