"""Reads training logs of Megatron-LM, Megatron-DeepSpeed and NeMo: iterations and job settings.

Lines may be truncated, or contain the interleaved output of two ranks. A field is used only if a
`|` follows it, so truncated numbers are discarded. `training_run` summarizes the result of
`read_log`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError, StoreError
from quantbench.files import UNREADABLE, open_unpacked, reason
from quantbench.units import size

_WHO = "import training log"
#: Largest size of a log. Logs are read block by block, so a log need not fit into memory.
_LARGEST_LOG_BYTES = 2**38
_LONGEST_LINE_BYTES = 2**24
_BLOCK_BYTES = 2**19
# An iteration is a line of fields separated by `|`, in an order that depends on the release:
# `[default7]: iteration 2/ 250000 | consumed samples: 384 | … | elapsed time per iteration (ms):
# 5350.0 |`. NeMo writes lines such as `Training epoch 0, iteration 9/99 | … | train_step_timing in
# s: 2.83 |`.
_MARK = re.compile(rb"elapsed time per iteration|train_step_timing in s")
_START = re.compile(rb"iteration +(\d+)/ *\d+ \|")
# Maps the log's name of a field to the field's column. A field has the unit of its column, except
# that milliseconds are converted to seconds.
_FIELDS = {
    b"elapsed time per iteration (ms)": "elapsed_s",
    b"elapsed time per iteration (s)": "elapsed_s",
    b"train_step_timing in s": "elapsed_s",
    b"consumed_samples": "consumed_samples",
    b"consumed samples": "consumed_samples",
    b"consumed tokens": "consumed_tokens",
    b"global_batch_size": "gbs",
    b"global batch size": "gbs",
    b"reduced_train_loss": "loss",
    b"lm loss": "loss",
    b"actual seq length": "seq",
    b"curriculum seqlen": "seq",
    b"TFLOPs": "tflops",
    b"throughput per GPU (TFLOP/s/GPU)": "tflops",
}
COLUMNS = tuple(dict.fromkeys(("iteration", *_FIELDS.values())))
#: Maps an argument whose value is a number to quantbench's name. Megatron prints its arguments at
#: the start of a job, in lines such as `micro_batch_size ....... 2`.
ARGUMENTS = {
    "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp",
    "data_parallel_size": "dp",
    "world_size": "gpus", "micro_batch_size": "mbs", "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads", "seq_length": "seq", "padded_vocab_size": "vocab",
    "ffn_hidden_size": "ffn",
    "kv_channels": "head_dim", "num_query_groups": "kv_heads", "context_parallel_size": "cp",
    "virtual_pipeline_model_parallel_size": "interleave", "num_experts": "experts",
    "moe_router_topk": "top_k",
    "moe_ffn_hidden_size": "moe_ffn", "expert_model_parallel_size": "ep", "zero_stage": "zero",
}  # fmt: skip
_FLAG = {"True": True, "False": False}
_NUMBER = {"True": 1, "False": 0}
#: Maps an argument that is a setting to quantbench's name, and to a mapping from printed values to
#: quantbench's values.
SETTINGS: dict[str, tuple[str, Mapping[str, object]]] = {
    "swiglu": ("gated", _FLAG),
    "untie_embeddings_and_output_weights": ("tied", {"True": False, "False": True}),
    "sequence_parallel": ("sequence_parallel", _FLAG),
    "recompute_granularity": (
        "recompute",
        {"full": "full", "selective": "selective", "None": "none"},
    ),
    "checkpoint_activations": ("recompute", {"True": "full"}),
    "use_distributed_optimizer": ("zero", _NUMBER),
    "bf16": ("precision", {"True": "bf16"}),
    "fp16": ("precision", {"True": "fp16"}),
    "overlap_grad_reduce": ("dp_overlap", _NUMBER),
    "hidden_dropout": ("dropout", {"0.0": False, "0.1": True}),
}
_ARGUMENT = re.compile(
    rb"(?:^|[ \t])(" + b"|".join(a.encode() for a in (*ARGUMENTS, *SETTINGS,
    "group_query_attention"))
    + rb") \.{2,} ([\w.]{1,15})(?![\w.])", re.MULTILINE,
)  # fmt: skip
# First line of Megatron: "using world size: 384, data-parallel-size: 8, tensor-model-parallel size:
# 4, pipeline-…: 12".
_WORLD = re.compile(
    rb"using world size: (\d{1,15}), data-parallel-size: (\d{1,15}), "
    rb"tensor-model-parallel size: (\d{1,15}), pipeline-model-parallel size: (\d{1,15})\b"
)

# Each rank of a node may print the line of an iteration. A line is therefore compared with up to
# _MOST_RANKS - 1 lines before it, to find repetitions.
_MOST_RANKS = 17

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Iterations:
    """Iterations of a log, in the order of its lines.

    values: maps each column of COLUMNS to its values, (iterations,); nan if a line lacks the field.
    segment: (iterations,), number of restarts of the job before each iteration.
    left_out: number of lines that are left out, by reason.
    arguments: maps quantbench's names to the job's printed parallel degrees, dimensions and
        settings.
    """

    values: dict[str, FloatArray]
    segment: npt.NDArray[np.int64]
    left_out: Counter[str]
    arguments: dict[str, Any]

    def __len__(self) -> int:
        return len(self.segment)

    @property
    def seq(self) -> FloatArray:
        """Tokens per sample, (iterations,).

        The value is the logged sequence length, or else consumed tokens / consumed samples, or else
        the printed argument seq_length.
        """
        logged = self.values["seq"]
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = self.values["consumed_tokens"] / self.values["consumed_samples"]
        found = np.where(np.isnan(logged), ratio, logged)
        return np.where(np.isnan(found), float(self.arguments.get("seq", np.nan)), found)

    @property
    def tokens_per_s(self) -> FloatArray:
        """Tokens per second of the whole job, as gbs × seq / elapsed_s, (iterations,).

        The rates that the log prints are not used.
        """
        return np.asarray(self.values["gbs"] * self.seq / self.values["elapsed_s"])


def read_log(path: Path) -> Iterations:
    """Reads all iterations of a log, which may be compressed (.gz or .xz).

    Raises StoreError if the log cannot be read, and InputError if it contains no iteration.
    """
    try:
        with open_unpacked(path, most_bytes=_LARGEST_LOG_BYTES) as stream:
            found = read_stream(stream)
    except UNREADABLE as error:
        raise StoreError(_WHO, f"{path} ({reason(error)})", "a log that can be read") from None
    if not len(found):
        what = f"{path.name} holds no iteration"
        if found.left_out:
            most = found.left_out.most_common(2)
            what += ": " + ", ".join(f"{count} lines {why}" for why, count in most)
        raise InputError(_WHO, what, "lines with 'iteration N/ M | … | elapsed time per iteration'")
    return found


def read_stream(stream: BinaryIO) -> Iterations:
    """Reads all iterations of an open log, block by block."""
    chunks: list[FloatArray] = []
    left_out: Counter[str] = Counter()
    arguments: dict[str, Any] = {}
    for block in _blocks(stream):
        if b" ..." in block or b"world size: " in block:
            for match in _WORLD.finditer(block):
                arguments |= zip(("gpus", "dp", "tp", "pp"), map(int, match.groups()), strict=True)
            printed = _ARGUMENT.findall(block)
            arguments |= _job({name.decode(): value.decode() for name, value in printed})
        rows = list(_rows(block, left_out))
        chunks.append(np.array(rows).reshape(-1, len(COLUMNS)))
    table = np.concatenate([np.empty((0, len(COLUMNS))), *chunks])  # (n, columns)
    values: dict[str, FloatArray] = dict(zip(COLUMNS, np.ascontiguousarray(table.T), strict=True))
    elapsed_s = values["elapsed_s"]
    timed = np.isfinite(elapsed_s) & (elapsed_s > 0)  # (n,)
    timed &= np.isfinite(values["gbs"]) & np.isfinite(values["iteration"])
    if not timed.all():
        without_gbs = int((np.isnan(values["gbs"]) & np.isfinite(elapsed_s)).sum())
        left_out["cut short before the batch size"] += without_gbs
        left_out["with an invalid time"] += int((~timed).sum()) - without_gbs
    values = {name: column[timed] for name, column in values.items()}
    echo = _echoes(values)
    left_out["repeated by another rank"] += int(echo.sum())
    values = {name: column[~echo] for name, column in values.items()}
    iteration = values["iteration"]
    # If the iteration number does not grow from one line to the next, the job has restarted.
    back = np.diff(iteration, prepend=iteration[:1]) <= 0
    back[:1] = False
    return Iterations(values, np.cumsum(back), +left_out, arguments)


def _job(printed: dict[str, str]) -> dict[str, Any]:
    """Returns the printed arguments under quantbench's names, with quantbench's values.

    Arguments with other values, such as None, are left out.

    printed: maps each argument to its printed value.
    """
    found: dict[str, Any] = {}
    for name, (ours, values) in SETTINGS.items():
        if printed.get(name) in values:
            found[ours] = values[printed[name]]
    for name, ours in ARGUMENTS.items():
        if printed.get(name, "").isdigit():
            found[ours] = int(printed[name])
    # Without query groups, Megatron prints num_query_groups = 1, which is not the number of key
    # heads.
    if printed.get("group_query_attention") == "False" and "heads" in found:
        found["kv_heads"] = found["heads"]
    return found


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Yields blocks of whole lines, about _BLOCK_BYTES each.

    Raises InputError for a line that is longer than _LONGEST_LINE_BYTES.
    """
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


def _rows(block: bytes, left_out: Counter[str]) -> Iterator[list[float]]:
    """Yields the values of COLUMNS for each iteration in a block.

    Lines with an iteration time that cannot be used are counted in `left_out`.
    """
    position = 0
    while found := _MARK.search(block, position):
        first = block.rfind(b"\n", 0, found.start()) + 1
        position = block.find(b"\n", found.start())
        if position < 0:
            position = len(block)
        # A line may contain the interleaved output of two ranks, so every match of _START begins an
        # iteration.
        starts = list(_START.finditer(block, first, position))
        if not starts:
            left_out["without an iteration"] += 1
        ends = [*(start.start() for start in starts[1:]), position]
        for start, end in zip(starts, ends, strict=False):
            row = {"iteration": float(start[1])}
            for text in block[start.end() : end].split(b"|")[:-1]:  # no bar follows the last part
                name, _, value = text.partition(b":")
                column = _FIELDS.get(name.strip())
                if column is not None and column not in row:
                    row[column] = _number(value)
                    if name.endswith(b"(ms)"):
                        row[column] /= 1e3
            if "elapsed_s" in row:
                yield [row.get(column, nan) for column in COLUMNS]
            else:
                left_out["cut short before the time"] += 1


def _number(text: bytes) -> float:
    """Reads a number. Returns nan for any other text."""
    try:
        return float(text)
    except ValueError:
        return nan


def _echoes(values: dict[str, FloatArray]) -> npt.NDArray[np.bool_]:
    """Returns whether each line repeats another rank's line, (lines,).

    A line repeats one of the _MOST_RANKS - 1 lines before it if both have the same iteration,
    consumed samples and time.
    """
    iteration = values["iteration"]
    samples = values["consumed_samples"]
    same = np.zeros(len(iteration), dtype=bool)
    for back in range(1, min(_MOST_RANKS, len(iteration))):
        alike = (iteration[back:] == iteration[:-back]) & (samples[back:] == samples[:-back])
        alike &= values["elapsed_s"][back:] == values["elapsed_s"][:-back]
        if not alike.any():
            break
        same[back:] |= alike
    return same
