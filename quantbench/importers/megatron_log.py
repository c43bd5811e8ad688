"""Training logs of Megatron-LM and Megatron-DeepSpeed: iterations with time, tokens per second, TFLOPs and loss.

One line an iteration, fields between bars, in an order that differs from release to release:

`[default7]: iteration 2/ 250000 | consumed samples: 384 | … | elapsed time per iteration (ms): 5350.0 | … |`

Read as a stream of blocks. The fields of each kind of line are learnt once and compiled to one expression, which then
finds all lines of that kind in a block in one go, also those that are cut short or share a line with another rank. A
field counts only when its closing bar is there, so that a number cut in half is never taken for a whole one.
"""

from __future__ import annotations

import itertools
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError, StoreError
from quantbench.files import open_unpacked, reason
from quantbench.units import size

_WHO = "import megatron-log"
#: logs are read block by block; a line is some hundred bytes
LARGEST_LOG_BYTES = 2**38
_LONGEST_LINE_BYTES = 2**24
# What is found in a block stays in the processor's cache until it is a number.
_BLOCK_BYTES = 2**19
_MARK = b"elapsed time per iteration"
_START = re.compile(rb"iteration +(\d+)/ *(\d+) \|")
_START_ALONE = rb"iteration +\d+/ *\d+ \|"
_FIELD = re.compile(rb" *([^:|\n]+?): *([^|\n]*?) *\|")
# What is taken of a line, by the log's own names.
_ELAPSED = {"elapsed time per iteration (ms)": 1e3, "elapsed time per iteration (s)": 1.0}  # units in a second
_WANTED = {
    **dict.fromkeys(_ELAPSED, "elapsed_s"),
    "consumed samples": "consumed_samples",
    "consumed tokens": "consumed_tokens",
    "global batch size": "gbs",
    "lm loss": "loss",
    "actual seq length": "seq",
    "curriculum seqlen": "seq",
    "number of skipped iterations": "skipped",
    "number of nan iterations": "nan_iterations",
    "samples per second": "samples_per_s",
    "TFLOPs": "tflops",
    "tokens per gpu per second (tgs)": "tokens_per_gpu_per_s",
}
COLUMNS = (
    "iteration", "elapsed_s", "consumed_samples", "consumed_tokens", "gbs", "loss", "seq", "skipped", "nan_iterations",
    "samples_per_s", "tflops", "tokens_per_gpu_per_s",
)  # fmt: skip
#: arguments that Megatron prints when it starts, `  micro_batch_size ....... 2`, and how they are called here
ARGUMENTS = {
    "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "data_parallel_size": "dp",
    "world_size": "gpus", "micro_batch_size": "mbs", "num_layers": "layers", "hidden_size": "hidden",
    "num_attention_heads": "heads", "seq_length": "seq", "padded_vocab_size": "vocab",
}  # fmt: skip
_ARGUMENT = re.compile(
    rb"(?:^|[ \t])(" + b"|".join(a.encode() for a in ARGUMENTS) + rb") \.{2,} (\d{1,15})\b", re.MULTILINE
)
# Megatron's first line: "using world size: 384, data-parallel-size: 8, tensor-model-parallel size: 4, pipeline-…: 12".
_WORLD = re.compile(
    rb"using world size: (\d{1,15}), data-parallel-size: (\d{1,15}), tensor-model-parallel size: (\d{1,15}), "
    rb"pipeline-model-parallel size: (\d{1,15})\b"
)

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Iterations:
    """Columns of equal length (n,), in the log's order; nan where a line does not tell.

    values: the columns of COLUMNS by name. segment: (n,) 0 for the first start of the job, one more after each
    restart. left_out: lines that were no iteration, counted by reason. arguments: the job's degrees and dimensions, as
    far as the log prints them.
    """

    values: dict[str, FloatArray]
    segment: npt.NDArray[np.int64]
    left_out: Counter[str]
    arguments: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.segment)

    @property
    def seq(self) -> FloatArray:
        """Tokens of a sample: as logged, from consumed tokens over samples, or from the job's arguments."""
        logged = self.values["seq"]
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = self.values["consumed_tokens"] / self.values["consumed_samples"]
        found = np.where(np.isnan(logged), ratio, logged)
        return np.where(np.isnan(found), float(self.arguments.get("seq", np.nan)), found)

    @property
    def tokens_per_s(self) -> FloatArray:
        """Samples per second times their length."""
        return np.asarray(self.values["gbs"] * self.seq / self.values["elapsed_s"])

    @property
    def final(self) -> npt.NDArray[np.bool_]:
        """(n,): whether a line is the last one of its iteration: what a restart did again is not counted twice."""
        iteration = self.values["iteration"]
        _, last = np.unique(iteration[::-1], return_index=True)
        mask = np.zeros(len(self), dtype=bool)
        mask[len(self) - 1 - last] = True
        return mask


def read_log(path: Path) -> Iterations:
    """All iterations of a log (plain, .gz or .xz). Raises InputError for one without any."""
    try:
        with open_unpacked(path, most_bytes=LARGEST_LOG_BYTES) as stream:
            found = read_stream(stream)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise StoreError(_WHO, f"{path} ({reason(error)})", "a log that can be read") from None
    if not len(found):
        why = ", ".join(f"{count} lines {reason}" for reason, count in found.left_out.most_common(2))
        what = f"{path.name} holds no iteration{': ' + why if why else ''}"
        raise InputError(_WHO, what, "lines with 'iteration N/ M | … | elapsed time per iteration'")
    return found


def read_stream(stream: BinaryIO) -> Iterations:
    """All iterations of an open log, read block by block."""
    reader = _Reader()
    for block in _blocks(stream):
        reader.take(block)
    return reader.finish()


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Whole lines, half a megabyte at a time."""
    rest = b""
    while block := stream.read(_BLOCK_BYTES):
        cut = block.rfind(b"\n") + 1
        if not cut:
            rest += block
            if len(rest) > _LONGEST_LINE_BYTES:
                longest = f"lines of at most {size(_LONGEST_LINE_BYTES)}, each with its end"
                raise InputError(_WHO, "a line without an end", longest)
            continue
        yield rest + block[:cut]
        rest = block[cut:]
    if rest:
        yield rest


class _Pattern:
    """The fields of one kind of line, as one expression over all of it.

    A line may be cut anywhere after its time: what is missing is empty then. Behind the last whole field there may be
    half a field and the end of the line, or where another rank's line begins.
    """

    def __init__(self, names: Sequence[bytes]) -> None:
        self.names = tuple(names)
        self.columns: list[str] = ["iteration", ""]
        self.per_second = 1.0
        whole, optional = [_START.pattern], 0
        for name in names:
            text = name.decode(errors="replace")
            column = _WANTED.get(text, "")
            timed = "elapsed_s" in self.columns
            if timed:
                whole.append(b"(?:")
                optional += 1
            if column == "elapsed_s" and not timed:
                self.per_second = _ELAPSED[text]
            if column and column not in self.columns:
                self.columns.append(column)
                whole.append(b" *" + re.escape(name) + rb":([^|\n]*+)\|")
            else:
                whole.append(b" *" + re.escape(name) + rb":[^|\n]*+\|")
        whole.append(b")?" * optional)
        whole.append(rb"(?=[^|\n]*+(?:\n|\Z)|[^|\n]*?" + _START_ALONE + b")")
        self.expression = re.compile(b"".join(whole))

    def numbers(self, found: Sequence[tuple[bytes, ...]]) -> dict[str, FloatArray]:
        """What the expression found in n lines, as columns of COLUMNS, each (n,)."""
        columns = {
            name: _numbers(texts) for name, texts in zip(self.columns, zip(*found, strict=True), strict=True) if name
        }
        columns["elapsed_s"] = columns["elapsed_s"] / self.per_second
        nothing = np.full(len(found), np.nan)
        return {name: columns.get(name, nothing) for name in COLUMNS}


class _Reader:
    """Reads block after block. The kinds of line that were seen are remembered, the last one first; a block of one kind
    is read in one go, a block of several kind by kind, and what fits none is looked at piece by piece."""

    def __init__(self) -> None:
        self._patterns: list[_Pattern] = []
        self._chunks: list[dict[str, FloatArray]] = []
        self._left_out: Counter[str] = Counter()
        self._arguments: dict[str, int] = {}
        self._mixed = False

    def take(self, block: bytes) -> None:
        """Read one block of whole lines."""
        if b"world size: " in block or b"world_size ." in block:
            self._read_arguments(block)
        expected = block.count(_MARK)
        if not expected:
            return
        for pattern in () if self._mixed else self._patterns:
            found = pattern.expression.findall(block)
            if len(found) == expected:
                self._chunks.append(pattern.numbers(found))
                return
            if found:
                break
        self._piecewise(block, expected)

    def _piecewise(self, block: bytes, expected: int) -> None:
        """A block of several kinds of line, or of kinds not known yet."""
        taken: dict[int, list[tuple[bytes, ...]]] = {}
        where: list[tuple[int, int, int]] = []  # begin of a piece, its pattern, its number among that pattern's
        ends: dict[int, int] = {}
        for number, pattern in enumerate(self._patterns):
            self._collect(pattern, number, block, 0, taken, where, ends)
        # Each piece that was taken has one time in it.
        for begin, end in self._unread(block, ends) if len(ends) < expected else ():
            learnt = self._learn(block[begin:end])
            if learnt is None:
                continue
            known = next((i for i, pattern in enumerate(self._patterns) if pattern.names == learnt.names), None)
            if known is None:
                known = len(self._patterns)
                self._patterns.append(learnt)
                self._collect(learnt, known, block, begin, taken, where, ends)
        where.sort()
        self._merge(taken, where)
        # The kind that was seen most is tried first in the next block; rare kinds are forgotten.
        often = sorted(range(len(self._patterns)), key=lambda i: -len(taken.get(i, ())))
        self._mixed = sum(bool(rows) for rows in taken.values()) > 1
        self._patterns = [self._patterns[i] for i in often[:_MOST_PATTERNS]]

    @staticmethod
    def _collect(
        pattern: _Pattern, number: int, block: bytes, begin: int, taken: dict[int, list[tuple[bytes, ...]]],
        where: list[tuple[int, int, int]], ends: dict[int, int],
    ) -> None:  # fmt: skip
        """Note all pieces of a kind that no other kind has taken."""
        rows = taken.setdefault(number, [])
        for match in pattern.expression.finditer(block, begin):
            if match.start() not in ends:
                ends[match.start()] = match.end()
                where.append((match.start(), number, len(rows)))
                rows.append(match.groups(b""))

    def _unread(self, block: bytes, ends: dict[int, int]) -> Iterator[tuple[int, int]]:
        """Begin and end of the pieces with a time in them that no kind has taken so far; `ends` may grow meanwhile."""
        position = 0
        while (mark := block.find(_MARK, position)) >= 0:
            first = block.rfind(b"\n", 0, mark) + 1
            last = block.find(b"\n", mark)
            last = len(block) if last < 0 else last
            # Two ranks that print at once can share a line: every start begins a piece of its own.
            starts = [match.start() for match in _START.finditer(block, first, last)]
            if not starts:
                self._left_out["without an iteration"] += 1
            for begin, end in itertools.pairwise([*starts, last] if starts else ()):
                if begin not in ends:
                    yield begin, end
            position = last

    def _learn(self, piece: bytes) -> _Pattern | None:
        """The kind of a piece, or None when it has no time."""
        start = _START.match(piece)
        assert start is not None
        names = [name for name, _ in _FIELD.findall(piece, start.end())]
        if not any(name.decode(errors="replace") in _ELAPSED for name in names):
            self._left_out["cut short before the time"] += 1
            return None
        return _Pattern(names)

    def _merge(self, taken: dict[int, list[tuple[bytes, ...]]], where: list[tuple[int, int, int]]) -> None:
        """Keep what was found, in the block's order."""
        if not where:
            return
        parts = {number: self._patterns[number].numbers(rows) for number, rows in taken.items() if rows}
        offsets, together = {}, 0
        for number, rows in taken.items():
            offsets[number] = together
            together += len(rows)
        order = np.array([offsets[number] + row for _, number, row in where])
        self._chunks.append({
            name: np.concatenate([part[name] for part in parts.values()])[order] for name in COLUMNS
        })  # fmt: skip

    def _read_arguments(self, block: bytes) -> None:
        for match in _WORLD.finditer(block):
            self._arguments.update(zip(("gpus", "dp", "tp", "pp"), map(int, match.groups()), strict=True))
        for name, value in _ARGUMENT.findall(block):
            self._arguments[ARGUMENTS[name.decode()]] = int(value)

    def finish(self) -> Iterations:
        """Join the blocks, drop what is no iteration, and find restarts."""
        nothing: FloatArray = np.array([])
        values = {
            name: np.concatenate([chunk[name] for chunk in self._chunks]) if self._chunks else nothing
            for name in COLUMNS
        }
        elapsed_s = values["elapsed_s"]
        timed = np.isfinite(elapsed_s) & (elapsed_s > 0) & np.isfinite(values["gbs"]) & np.isfinite(values["iteration"])
        if not timed.all():
            without_gbs = int((np.isnan(values["gbs"]) & np.isfinite(elapsed_s)).sum())
            self._left_out["cut short before the batch size"] += without_gbs
            self._left_out["with a time that is none"] += int((~timed).sum()) - without_gbs
        values = {name: column[timed] for name, column in values.items()}
        echo = _echoes(values)
        self._left_out["repeated by another rank"] += int(echo.sum())
        values = {name: column[~echo] for name, column in values.items()}
        iteration = values["iteration"]
        back = np.diff(iteration, prepend=iteration[:1]) <= 0
        if len(back):
            back[0] = False
        return Iterations(values, np.cumsum(back), +self._left_out, self._arguments)


def _numbers(texts: tuple[bytes, ...]) -> FloatArray:
    """Texts as numbers; what is none (`nan`, half a number, nothing) is nan."""
    if texts.count(texts[0]) == len(texts):
        return np.full(len(texts), _number(texts[0]))
    whole = [text or b"nan" for text in texts] if b"" in texts else texts
    try:
        return np.fromiter(map(float, whole), dtype=np.float64, count=len(texts))
    except ValueError:
        return np.array([_number(text) for text in whole])


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _echoes(values: dict[str, FloatArray]) -> npt.NDArray[np.bool_]:
    """(n,): lines that repeat the one before: the same iteration after the same number of samples, by another rank."""
    iteration, samples = values["iteration"], values["consumed_samples"]
    same = np.zeros(len(iteration), dtype=bool)
    for back in range(1, min(_MOST_RANKS, len(iteration))):
        alike = (iteration[back:] == iteration[:-back]) & (samples[back:] == samples[:-back])
        alike &= values["elapsed_s"][back:] == values["elapsed_s"][:-back]
        if not alike.any():
            break
        same[back:] |= alike
    return same


# Kinds of line that are tried on a block: one a log, and a few where logs are joined.
_MOST_PATTERNS = 8
# Ranks that may print one iteration in a row: those of a node.
_MOST_RANKS = 17
