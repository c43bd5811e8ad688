"""What a training log says in a few figures, and the folder it is kept in.

`results/<device-slug>/<run-id>/training.json` (format `quantbench-training`) and `iterations.csv` beside it, one line
an iteration.

History of the format:
1  first version.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError, StoreError
from quantbench.files import folders_with, open_binary, read_text, reason
from quantbench.importers.megatron_log import COLUMNS, LARGEST_LOG_BYTES, Iterations
from quantbench.stats import median_interval
from quantbench.store.environment import installed_versions, relevant_environment
from quantbench.store.run import require_name
from quantbench.store.typed import decode

TRAINING_FORMAT = "quantbench-training"
TRAINING_VERSION = 1
_CHUNK_BYTES = 2**24
_ROWS_AT_ONCE = 2**14
# Whole numbers up to here are exact as float64.
_EXACT = 2**53
# The first iteration after a start loads, compiles and fills caches: the documents took the second.
_WARM_UP = 1

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TrainingSummary:
    """A log in a few figures; None where it does not tell.

    gpus, tp, pp, dp, mbs: the layout. gbs, seq: of the last iteration. iterations: that count; restarts: times that the
    job began again. sec_per_it, tokens_per_s, tflops: medians without the first iteration after each start;
    tokens_per_s_low, tokens_per_s_high: 95 % interval. first_loss, last_loss: the first and last that are numbers;
    nan_losses: how many are none. left_out: lines that are no iteration, by reason.
    """

    name: str
    gpus: int | None
    tp: int | None
    pp: int | None
    dp: int | None
    mbs: int | None
    gbs: int
    seq: int | None
    iterations: int
    restarts: int
    skipped: int
    nan_losses: int
    sec_per_it: float
    tokens_per_s: float | None
    tokens_per_s_low: float | None
    tokens_per_s_high: float | None
    tflops: float | None
    first_loss: float | None
    last_loss: float | None
    left_out: dict[str, int]

    @property
    def layout(self) -> str:
        """`TP=2, PP=4`, as far as it is known."""
        known = [f"{name.upper()}={value}" for name in ("tp", "pp") if (value := getattr(self, name)) is not None]
        return ", ".join(known) or "layout not known"


def summarize(name: str, found: Iterations, given: Mapping[str, int] | None = None) -> TrainingSummary:
    """Figures of a log. given: degrees that the log does not print (gpus, tp, pp, dp, mbs), or prints wrongly."""
    degrees = {**found.arguments, **(given or {})}
    steady = _steady(found)
    tokens = found.tokens_per_s[steady]
    tokens = tokens[np.isfinite(tokens)]
    tflops = found.values["tflops"][steady]
    tflops = tflops[np.isfinite(tflops)]
    losses = found.values["loss"]
    numbers = losses[np.isfinite(losses)]
    seq = found.seq[np.isfinite(found.seq)]
    interval = median_interval(tokens) if len(tokens) else None
    return TrainingSummary(
        name=name,
        gpus=degrees.get("gpus"), tp=degrees.get("tp"), pp=degrees.get("pp"), dp=degrees.get("dp"),
        mbs=degrees.get("mbs"),
        gbs=int(found.values["gbs"][-1]),
        seq=round(float(seq[-1])) if len(seq) else None,
        iterations=int(found.final.sum()),
        restarts=int(found.segment[-1]),
        skipped=int(np.nansum(found.values["skipped"])),
        nan_losses=int((~np.isfinite(losses)).sum()) if np.isfinite(losses).any() else 0,
        sec_per_it=float(np.median(found.values["elapsed_s"][steady])),
        tokens_per_s=float(np.median(tokens)) if len(tokens) else None,
        tokens_per_s_low=None if interval is None else interval.low,
        tokens_per_s_high=None if interval is None else interval.high,
        tflops=float(np.median(tflops)) if len(tflops) else None,
        first_loss=float(numbers[0]) if len(numbers) else None,
        last_loss=float(numbers[-1]) if len(numbers) else None,
        left_out=dict(found.left_out),
    )  # fmt: skip


def _steady(found: Iterations) -> npt.NDArray[np.bool_]:
    """Iterations beyond the first of each start, or all where there are no others; of the last batch size alone."""
    first = np.zeros(len(found), dtype=bool)
    starts = np.flatnonzero(np.diff(found.segment, prepend=-1))
    for back in range(_WARM_UP):
        first[np.minimum(starts + back, len(found) - 1)] = True
    # A batch that ramps up is another workload every few iterations.
    same = found.values["gbs"] == found.values["gbs"][-1]
    steady = same & ~first
    return np.asarray(steady if steady.any() else same)


def write_training(
    results: Path, device: str, run_id: str, source: Path, found: Iterations, summary: TrainingSummary
) -> Path:
    """Write the folder; an existing one is left alone when it holds the same log, and refused when it does not."""
    folder = results / device / require_name("import megatron-log", run_id)
    digest = _sha256(source)
    if os.path.exists(folder):
        known = _source_of(folder)
        if known != digest:
            raise StoreError("import megatron-log", f"{folder} holds another log", "another --run-id")
        return folder
    data: dict[str, Any] = {
        "format": TRAINING_FORMAT,
        "version": TRAINING_VERSION,
        "run_id": run_id,
        "device": device,
        "source": {"file": source.name, "sha256": digest, "bytes": source.stat().st_size},
        "arguments": found.arguments,
        "summary": asdict(summary),
        "software": installed_versions(),
        "environment": relevant_environment(),
    }
    try:
        folder.mkdir(parents=True)
        _write_iterations(folder / "iterations.csv", found)
        temporary = folder / "training.json.new"
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, folder / "training.json")
    except OSError as error:
        raise StoreError(
            "import megatron-log", f"{folder} ({error.strerror})", "a folder that can be written"
        ) from None
    return folder


def read_training(folder: Path) -> TrainingSummary:
    """The summary that `write_training` left. Raises StoreError for anything else."""
    data = _load(folder)
    try:
        return decode(TrainingSummary, data.get("summary"))
    except InputError as error:
        raise StoreError("read training", f"{folder / 'training.json'} ({error})", "a whole summary") from None


def training_folders(paths: Sequence[Path]) -> list[Path]:
    """Those of `paths`, and the folders right inside them, that hold an imported training log."""
    found = []
    for path in paths:
        own = [path] if os.path.isfile(path / "training.json") else []
        found += own or folders_with(path, "*/training.json")
    return found


def _load(folder: Path) -> dict[str, Any]:
    path = folder / "training.json"
    try:
        data = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError("read training", f"{path} ({reason(error)})", "a training.json") from None
    found = (data.get("format"), data.get("version")) if isinstance(data, dict) else (None, None)
    if found != (TRAINING_FORMAT, TRAINING_VERSION):
        raise StoreError("read training", f"{path} is {found}", f"{TRAINING_FORMAT} version {TRAINING_VERSION}")
    return dict(data)


def _source_of(folder: Path) -> str:
    return str(_load(folder)["source"]["sha256"])


def _write_iterations(path: Path, found: Iterations) -> None:
    columns = {"segment": found.segment, "final": found.final, **found.values, "seq": found.seq}
    columns["tokens_per_s"] = found.tokens_per_s
    names = ["segment", "final", *COLUMNS, "tokens_per_s"]
    with path.open("w", newline="", encoding="utf-8") as stream:
        stream.write(",".join(names) + "\r\n")
        for begin in range(0, len(found), _ROWS_AT_ONCE):
            cells = [_cells(columns[name][begin : begin + _ROWS_AT_ONCE]) for name in names]
            stream.write("\r\n".join(map(",".join, zip(*cells, strict=True))) + "\r\n")


def _cells(values: npt.NDArray[Any]) -> list[str]:
    """Numbers as text, column by column: a long log is as much to write as to read."""
    known = values[np.isfinite(values)]
    if len(known) == len(values) and not (values % 1).any() and np.abs(values).max(initial=0) < _EXACT:
        return list(map(str, values.astype(np.int64).tolist()))
    return ["" if value != value else f"{value:.10g}" for value in values.tolist()]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open_binary(path, most_bytes=LARGEST_LOG_BYTES) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise StoreError("import megatron-log", f"{path} ({error.strerror})", "a log that can be read") from None
    return digest.hexdigest()


def default_run_id(path: Path) -> str:
    """A run's name from its file's: `train.log` → `megatron-train`.

    >>> default_run_id(Path("logs/tr11 176B.log.gz"))
    'megatron-tr11-176B'
    """
    stem = path.name.split(".")[0]
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).strip("-.")
    if not safe:
        raise InputError("import megatron-log", f"{path.name!r}", "--run-id for a file of that name")
    return f"megatron-{safe}"
