"""Summarizes training logs and stores the summaries.

The folder `results/<device-slug>/<run-id>/` has `training.json` (`quantbench-training`, version 1:
initial) and `iterations.csv`.
"""

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
from quantbench.files import folders_with, open_binary, read_json, reason, write_file
from quantbench.importers.megatron_log import LARGEST_LOG_BYTES, Iterations
from quantbench.stats import median_interval
from quantbench.store.environment import installed_versions, relevant_environment
from quantbench.store.run import require_name
from quantbench.store.typed import decode

TRAINING_FORMAT = "quantbench-training"
TRAINING_VERSION = 1
_WHO = "import training log"
_WRITABLE = "a folder that can be written"

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TrainingSummary:
    """Summary of a training log; None for values that the log does not contain.

    gbs, seq: values of the last iteration.
    sec_per_it, tokens_per_s, tflops: medians over the iterations of that gbs, without the first
        after each start.
    tokens_per_s_low, tokens_per_s_high: 95 % interval of the median.
    first_loss, last_loss: first and last finite loss.
    nan_losses: number of other losses.
    left_out: lines left out, by reason.
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
        """Formats the known degrees: `TP=2, PP=4`."""
        known = []
        if self.tp is not None:
            known.append(f"TP={self.tp}")
        if self.pp is not None:
            known.append(f"PP={self.pp}")
        return ", ".join(known) or "layout not known"


def summarize(
    name: str, found: Iterations, given: Mapping[str, int] | None = None
) -> TrainingSummary:
    """Summarizes a log. given: degrees (gpus, tp, pp, dp, mbs) that replace those in the log."""
    degrees = {**found.arguments, **(given or {})}
    steady = _steady(found)
    tokens = _finite(found.tokens_per_s[steady])
    tflops = _finite(found.values["tflops"][steady])
    losses = found.values["loss"]
    numbers = _finite(losses)
    seq = _finite(found.seq)
    low = high = last_seq = None
    if len(tokens):
        interval = median_interval(tokens)
        low = interval.low
        high = interval.high
    if len(seq):
        last_seq = round(float(seq[-1]))
    return TrainingSummary(
        name=name,
        gpus=degrees.get("gpus"),
        tp=degrees.get("tp"),
        pp=degrees.get("pp"),
        dp=degrees.get("dp"),
        mbs=degrees.get("mbs"),
        gbs=int(found.values["gbs"][-1]),
        seq=last_seq,
        iterations=int(found.final.sum()),
        restarts=int(found.segment[-1]),
        skipped=int(np.nansum(found.values["skipped"])),
        nan_losses=(len(losses) - len(numbers)) * bool(len(numbers)),
        sec_per_it=float(np.median(found.values["elapsed_s"][steady])),
        tokens_per_s=_median(tokens),
        tokens_per_s_low=low,
        tokens_per_s_high=high,
        tflops=_median(tflops),
        first_loss=_median(numbers[:1]),
        last_loss=_median(numbers[-1:]),
        left_out=dict(found.left_out),
    )


def _median(values: FloatArray) -> float | None:
    return float(np.median(values)) if len(values) else None


def _finite(values: FloatArray) -> FloatArray:
    return np.asarray(values[np.isfinite(values)])


def _steady(found: Iterations) -> npt.NDArray[np.bool_]:
    """Returns (n,) whether an iteration has the last batch size and is not the first after a start
    (if any is so).
    """
    # While the batch size ramps up, the workload changes every few iterations; the first after a
    # start fills caches.
    same = found.values["gbs"] == found.values["gbs"][-1]
    steady = same & (np.diff(found.segment, prepend=-1) == 0)
    return np.asarray(steady if steady.any() else same)


def write_training(
    results: Path,
    device: str,
    run_id: str,
    source: Path,
    found: Iterations,
    summary: TrainingSummary,
) -> Path:
    """Writes the folder, or leaves it unchanged if it holds the same log. Raises StoreError if it
    holds another.
    """
    folder = results / device / require_name(_WHO, run_id)
    try:
        with open_binary(source, most_bytes=LARGEST_LOG_BYTES) as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
    except OSError as error:
        raise StoreError(_WHO, f"{source} ({error.strerror})", "a log that can be read") from None
    if os.path.exists(folder):
        if str(_load(folder)["source"]["sha256"]) != digest:
            raise StoreError(_WHO, f"{folder} holds another log", "another --run-id")
        return folder
    data = {
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
    except OSError as error:
        raise StoreError(_WHO, f"{folder} ({error.strerror})", _WRITABLE) from None
    text = json.dumps(data, indent=1) + "\n"
    write_file(_WHO, folder / "training.json", text, expected=_WRITABLE)
    return folder


def read_training(folder: Path) -> TrainingSummary:
    """Reads a summary written by `write_training`. Raises StoreError if it is malformed."""
    data = _load(folder)
    try:
        return decode(TrainingSummary, data.get("summary"))
    except InputError as error:
        raise StoreError(
            "read training", f"{folder / 'training.json'} ({error})", "a whole summary"
        ) from None


def training_folders(paths: Sequence[Path]) -> list[Path]:
    """Returns those of `paths`, and of the folders directly in them, that hold an imported training
    log.
    """
    found = []
    for path in paths:
        if os.path.isfile(path / "training.json"):
            found.append(path)
        else:
            found += folders_with(path, "*/training.json")
    return found


def _load(folder: Path) -> dict[str, Any]:
    path = folder / "training.json"
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise StoreError("read training", f"{path} ({reason(error)})", "a training.json") from None
    if not isinstance(data, dict):
        data = {}
    found = (data.get("format"), data.get("version"))
    if found != (TRAINING_FORMAT, TRAINING_VERSION):
        raise StoreError(
            "read training", f"{path} is {found}", f"{TRAINING_FORMAT} version {TRAINING_VERSION}"
        )
    return data


def _write_iterations(path: Path, found: Iterations) -> None:
    import pyarrow as pa
    from pyarrow import csv

    columns = {
        "segment": found.segment,
        "final": found.final.astype(np.int64),
        **found.values,
        "seq": found.seq,
    }
    columns["tokens_per_s"] = found.tokens_per_s
    # nan becomes an empty cell
    table = pa.table({name: pa.array(values, from_pandas=True) for name, values in columns.items()})
    with path.open("wb") as stream:
        stream.write((",".join(columns) + "\n").encode())  # pyarrow would put the names in quotes
        csv.write_csv(table, stream, csv.WriteOptions(include_header=False))


def default_run_id(path: Path) -> str:
    """Derives a run id from the log's file name: `train.log` → `megatron-train`.

    >>> default_run_id(Path("logs/tr11 176B.log.gz"))
    'megatron-tr11-176B'
    """
    stem = path.name.split(".")[0]
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).strip("-.")
    if not safe:
        raise InputError(_WHO, f"{path.name!r}", "--run-id for a file of that name")
    return f"megatron-{safe}"
