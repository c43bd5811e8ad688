"""Writes the explorer: one self-contained HTML file that predicts any shape of a transformer on some GPUs.

Entry points: `write_explorer`; `shelf_devices`; `fitted_models`, the `FittedModel`s of a profile. Used by the command
`explore` and `tools.guide.explorer`.

The file holds the shipped models of each GPU (`evaluator`), so that a browser computes what `quantbench predict`
prints.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from quantbench import __version__
from quantbench.advice.cost import WIDER
from quantbench.device import default_dtype, known
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, printable
from quantbench.explore.evaluator import Blobs, attention_model, gemm_model
from quantbench.files import write_file
from quantbench.latency.attention import AttentionModel
from quantbench.latency.gemm.model import GemmModel, shipped_model
from quantbench.latency.libraries import default_library, libraries_of
from quantbench.latency.model_times import best_gemm_model
from quantbench.latency.op_times import UNMEASURED_COMMON
from quantbench.report.page import template_text
from quantbench.workload import TransformerShape
from quantbench.workload.dtypes import DTYPES, GEMM_DTYPES
from quantbench.workload.presets import preset, preset_names

_SIZES = ("hidden", "heads", "kv_heads", "head_dim", "ffn", "seq", "mbs", "tp", "vocab", "layers")
_FLAGS = ("gated", "gate_fused", "tied")
_SCRIPTS = ("model.js", "shape.js", "app.js")
# The routing of a layer with more experts is not drawn.
_MOST_EXPERTS = 512
_FIRST_LINES = 4
_MOST_ROWS = 8000


@dataclass(frozen=True)
class FittedModel:
    """A GEMM model to show instead of the shipped one of its dtype, with a note on its source."""

    model: GemmModel
    note: str


def shelf_devices() -> tuple[DeviceSpec, ...]:
    """Returns the GPUs with a shipped GEMM model of their default dtype."""
    return tuple(spec for spec in known() if spec.kind == "cuda" and shipped_model(spec.name, default_dtype(spec)))


def write_explorer(
    path: Path,
    devices: Sequence[DeviceSpec],
    shape: TransformerShape,
    *,
    title: str = "",
    fitted: Mapping[str, FittedModel] | None = None,
) -> int:
    """Writes the page and returns its size in bytes.

    shape: setting that the page starts with.
    title: heading, plain text.
    fitted: models by dtype that replace the shipped ones, for one device.

    Raises InputError for a device that is no GPU, StoreError if the file cannot be written.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    blobs = Blobs()
    notes: dict[str, None] = {}
    gpus = [_gpu(device, blobs, notes, fitted or {}) for device in devices]
    draws = Random(0)
    content = {
        "gpus": gpus,
        "lines": _FIRST_LINES,
        "setting": _setting(shape),
        "presets": {name: _sizes(preset(name)) for name in preset_names() if not preset(name).kv_rank},
        "formats": {
            name: {
                "bytes": DTYPES[name].element_bytes,
                "packed": DTYPES[name].packed,
                "output": DTYPES[DTYPES[name].output].element_bytes,
                "attention": _attention_dtype(name),
            }
            for name in GEMM_DTYPES
        },
        "draws": blobs.add(np.array([draws.random() for _ in range(_MOST_EXPERTS)])),
        "wider": WIDER,
        "unmeasured_common": UNMEASURED_COMMON,
    }
    environment = Environment(loader=PackageLoader("quantbench.explore"), autoescape=True,
                              undefined=StrictUndefined, trim_blocks=True)  # fmt: skip
    text = environment.get_template("explore.html.j2").render(
        title=printable(title or "quantbench explore", 200),
        styles="\n".join([template_text("explore.css", __package__), template_text("uplot.min.css")]),
        script="\n".join([template_text("uplot.min.js"), *(template_text(name, __package__) for name in _SCRIPTS)]),
        data=_packed(content, blobs),
        notes=list(notes),
        version=__version__,
    )
    write_file("explore", path, text)
    return len(text.encode())


def _packed(content: dict[str, Any], blobs: Blobs) -> str:
    """Returns JSON and arrays as base64 of one deflated block: length of the JSON, the JSON, the arrays."""
    text = json.dumps(content).encode()
    whole = struct.pack("<II", len(text), 0) + text + bytes(-len(text) % 8) + b"".join(blobs.parts)
    return base64.b64encode(zlib.compress(whole, 9)).decode("ascii")


def _gpu(device: DeviceSpec, blobs: Blobs, notes: dict[str, None], fitted: Mapping[str, FittedModel]) -> dict[str, Any]:
    if device.kind == "cpu":
        raise InputError("explore", f"--gpu {device.name}", "a GPU: processors are measured, not predicted")
    entries = []
    for dtype, library, model, note in _models(device, fitted):
        notes[note] = None
        entry = {"id": f"{device.name}/{dtype}/{library}", "dtype": dtype, "library": library}
        entries.append({**entry, "gemm": gemm_model(model, blobs)})
    usual = default_dtype(device)
    entries.sort(key=lambda entry: entry["dtype"] != usual)
    attention = AttentionModel.best(device)
    notes[attention.note] = None
    wanted = {_attention_dtype(str(entry["dtype"])) for entry in entries}
    return {
        "name": device.name,
        "slug": device.name,
        "sm_count": device.sm_count,
        "peaks": dict(device.peak_tflops),
        "entries": entries,
        "attention": {dtype: attention_model(attention, dtype, blobs) for dtype in sorted(wanted)},
    }


def _models(device: DeviceSpec, fitted: Mapping[str, FittedModel]) -> Iterator[tuple[str, str, GemmModel, str]]:
    """Yields dtype, library, model and note of every product that the page can show on a device."""
    for dtype in GEMM_DTYPES:
        if device.peak(dtype) is None or device.peak(_attention_dtype(dtype)) is None:
            continue
        if dtype in fitted:
            yield dtype, fitted[dtype].model.library, fitted[dtype].model, fitted[dtype].note
            continue
        usual = default_library(device.name, dtype)
        for library in libraries_of(device.name, dtype) or (usual,):
            if library == usual or shipped_model(device.name, dtype, library) is not None:
                yield dtype, library, *best_gemm_model(device, dtype, library)


def _attention_dtype(dtype: str) -> str:
    return TransformerShape(hidden=128, heads=1, dtype=dtype).attention_dtype


def _sizes(shape: TransformerShape) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in (*_SIZES, *_FLAGS)}


def _setting(shape: TransformerShape) -> dict[str, Any]:
    experts = {"experts": 0, "top_k": 2, "expert_ffn": shape.ffn, "ep": 1, "skew": "balanced"}
    return {**_sizes(shape), "axis": "hidden", "direction": "forward", **experts}


def fitted_models(path: Path) -> tuple[DeviceSpec, dict[str, FittedModel]]:
    """Fits a model to the single products of each dtype in a profile; returns its device and the models by dtype.

    Of more than _MOST_ROWS rows, as many are drawn at random (seed 0). A profile without rows has no models of its own.
    """
    from quantbench.profile import Profile

    profile = Profile.load(path)
    table = profile.tables["gemm"]
    found = {}
    for dtype in sorted(set(table["dtype"])):
        rows = np.flatnonzero((table["dtype"] == dtype) & (table["batch"] == 1))
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:_MOST_ROWS])
        m, n, k = (table[name][rows] for name in "mnk")
        layouts = list(map(str, table["layout"][rows]))
        model = GemmModel.fit(profile.device, m, n, k, table["latency_us"][rows], layout=layouts, dtype=str(dtype))
        note = f"{dtype} products on {profile.device.name}: fitted to {len(rows):,} rows of the profile {path.name}"
        found[str(dtype)] = FittedModel(model, printable(note, 200))
    return profile.device, found
