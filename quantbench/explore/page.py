"""Writes the explorer: one HTML file that predicts any shape of a transformer on some GPUs.

The file contains each GPU's latency models (`evaluator`), so that a browser computes the same times
as `quantbench predict`. `write_explorer` is the entry point. The GEMM models are those of the
package, or models that are fitted to the user's profile (`fitted_models`).
"""

import base64
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench import __version__
from quantbench.advice.cost import WIDER
from quantbench.advice.search import EQUAL_WITHIN, LINE_ELEMENTS, MIN_GAIN
from quantbench.advice.space import DIMENSIONS, EXPERT_FACTOR, LARGEST_EP, Space
from quantbench.alignment_rules import crash_rules, row_steps
from quantbench.device import default_dtype
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, printable
from quantbench.explore.evaluator import (
    Blobs,
    attention_model,
    experts_model,
    gemm_model,
    softmax_model,
)
from quantbench.explore.shapes import FLAGS, SIZES, shape_script
from quantbench.files import write_file
from quantbench.latency.attention import AttentionModel
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.gemm.model import GemmModel, shipped_model
from quantbench.latency.libraries import default_library, libraries_of
from quantbench.latency.model_times import best_gemm_model
from quantbench.latency.moe import MoEModel
from quantbench.latency.moe_features import LOAD_DRAWS
from quantbench.latency.op_times import UNALIGNED_SHARE, UNALIGNED_SPREAD, UNMEASURED_COMMON
from quantbench.report.page import template_text
from quantbench.workload import Gemm, TransformerShape
from quantbench.workload.dtypes import DTYPES, GEMM_DTYPES
from quantbench.workload.ops import LAYOUTS
from quantbench.workload.presets import preset, preset_names

_SCRIPTS = ("model.js", "shape.js", "app.js")
# Maximum number of experts for which the page draws a random routing.
_MOST_EXPERTS = 1024
_FIRST_LINES = 4  # number of lines that the chart shows when the page opens
_FITTED_ROWS = 8000  # maximum number of profile rows to which a model is fitted


@dataclass(frozen=True)
class FittedModel:
    """GEMM model that replaces the shipped model of its dtype in a page, with measured times.

    note: source of the model, for the user.
    sizes: m, n and k of measured GEMMs, whose times the page looks up (rows, 3).
    times: time and bounds of its interval (low, high) in µs, for each layout in `LAYOUTS` in turn
        (rows, 9).
    """

    model: GemmModel
    note: str
    sizes: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 3), np.int32))
    times: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 9), np.float32))


def write_explorer(
    path: Path,
    devices: Sequence[DeviceSpec],
    shape: TransformerShape,
    *,
    title: str = "",
    fitted: Mapping[str, FittedModel] | None = None,
) -> int:
    """Writes the page and returns its size in bytes.

    devices: GPUs whose models the page contains.
    shape: shape that the page shows when it opens.
    title: heading as plain text; default `quantbench explore`.
    fitted: models by dtype that replace the shipped models; only for a page with one device.

    Raises InputError for a device that is not a GPU, and StoreError if the file cannot be written.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    blobs = Blobs()
    notes: dict[str, None] = {}
    gpus = [_gpu(device, blobs, notes, fitted or {}) for device in devices]
    random = Random(0)
    draws = [random.random() for _ in range(_MOST_EXPERTS)]
    scripts = [template_text("uplot.min.js")]
    scripts += [template_text(name, __package__) for name in _SCRIPTS]
    styles = [template_text("explore.css", __package__), template_text("uplot.min.css")]
    content = {
        "gpus": gpus,
        "lines": _FIRST_LINES,
        "setting": {**_sizes(shape), "axis": "hidden", "direction": "forward"},
        "presets": {name: _sizes(preset(name)) for name in preset_names()},
        "formats": {name: _format(name) for name in GEMM_DTYPES},
        "draws": blobs.add(np.array(draws)),
        "load_draws": blobs.add(np.random.default_rng(0).random(LOAD_DRAWS * _MOST_EXPERTS)),
        "unaligned": {"share": UNALIGNED_SHARE, "spread": UNALIGNED_SPREAD},
        "shape": blobs.add(shape_script()),
        "largest_side": LARGEST_SIDE,
        "most_experts": _MOST_EXPERTS,
        "wider": WIDER,
        "dimensions": DIMENSIONS,
        "space": {
            **vars(Space()),
            "expert_factor": EXPERT_FACTOR,
            "largest_ep": LARGEST_EP,
            "as_good": EQUAL_WITHIN,
            "worth_moving": MIN_GAIN,
            "line_elements": LINE_ELEMENTS,
        },
        "unmeasured_common": UNMEASURED_COMMON,
    }
    environment = Environment(
        loader=PackageLoader("quantbench.explore"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    text = environment.get_template("explore.html.j2").render(
        title=printable(title or "quantbench explore", 200),
        styles="\n".join(styles),
        script="\n".join(scripts),
        data=_packed(content, blobs),
        notes=list(notes),
        dimensions=DIMENSIONS,
        presets=preset_names(),
        version=__version__,
    )
    write_file("explore", path, text)
    return len(text.encode())


def _format(dtype: str) -> dict[str, Any]:
    """Returns the properties of a dtype that the page needs.

    The properties are the bytes of an element and of a weight, the sizes at which rows are aligned,
    by layout, and the dtype in which attention runs.
    """
    return {
        "bytes": DTYPES[dtype].element_bytes,
        "rows": [row_steps(Gemm(1, 1, 1, dtype=dtype, layout=layout)) for layout in LAYOUTS],
        "attention": _attention_dtype(dtype),
        "weight": DTYPES[dtype].b_bytes,
    }


def _packed(content: dict[str, Any], blobs: Blobs) -> str:
    """Returns the page's data as base64 of one deflated block.

    The block contains the length of the JSON text in 8 bytes, the JSON text, and the blobs. JSON
    text and blobs are padded to multiples of 8 bytes.
    """
    text = json.dumps(content).encode()
    whole = struct.pack("<II", len(text), 0) + text + bytes(-len(text) % 8) + b"".join(blobs.parts)
    return base64.b64encode(zlib.compress(whole, 9)).decode("ascii")


def _gpu(
    device: DeviceSpec, blobs: Blobs, notes: dict[str, None], fitted: Mapping[str, FittedModel]
) -> dict[str, Any]:
    """Returns a GPU's data for the page: its constants, and its models by dtype and library.

    notes: notes on the models' sources; this function adds those of the GPU.
    fitted: see `write_explorer`.

    Raises InputError for a CPU.
    """
    if device.kind == "cpu":
        expected = "a GPU: processors are measured, not predicted"
        raise InputError("explore", f"--gpu {device.name}", expected)
    entries = []
    for dtype, library, model, note in _models(device, fitted):
        usual = default_library(device.name, dtype)
        of_experts = "" if library == usual else library
        experts = MoEModel.best(device, dtype=dtype, library=of_experts)
        notes[f"{dtype}: {note}"] = None
        notes[f"{dtype}: {experts.note}"] = None
        shown = fitted.get(dtype, FittedModel(model, ""))
        measured = {"sizes": blobs.add(shown.sizes), "times": blobs.add(shown.times)}
        entry: dict[str, Any] = {
            "id": f"{device.name}/{dtype}/{library}",
            "dtype": dtype,
            "library": library,
            "gemm": {**gemm_model(model, blobs), "measured": measured},
            "crashes": [vars(rule) for rule in crash_rules(dtype, of_experts, device)],
            "experts": experts_model(experts, blobs),
        }
        entries.append(entry)
    entries.sort(key=lambda entry: entry["dtype"] != default_dtype(device))
    attention = AttentionModel.best(device)
    notes[attention.note] = None
    wanted = {_attention_dtype(entry["dtype"]) for entry in entries}
    return {
        "name": device.name,
        "slug": device.name,
        "sm_count": device.sm_count,
        "peaks": {dtype: device.peak(dtype) for dtype in GEMM_DTYPES},
        "bytes_per_us": device.memory_gb_per_s * 1e3,
        "memory_bytes": device.memory_bytes,
        "softmax": softmax_model(device, blobs),
        "entries": entries,
        "attention": {dtype: attention_model(attention, dtype, blobs) for dtype in sorted(wanted)},
    }


def _models(
    device: DeviceSpec, fitted: Mapping[str, FittedModel]
) -> Iterator[tuple[str, str, GemmModel, str]]:
    """Yields (dtype, library, model, note) for each GEMM model that the page shows for a device.

    A dtype is left out if its peak, or the peak of its attention dtype, is unknown.
    """
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
    """Returns the dtype in which a transformer with GEMMs in `dtype` runs attention."""
    return TransformerShape(hidden=128, heads=1, dtype=dtype).attention_dtype


def _sizes(shape: TransformerShape) -> dict[str, Any]:
    """Converts a shape to the settings of the page."""
    names = (*SIZES, *FLAGS, "attention", "sliding_window", "routing")
    setting = {name: getattr(shape, name) for name in names}
    if not isinstance(shape.routing, str):
        setting["routing"] = "balanced"
    # Sizes that the page uses if the user switches on experts or latent attention.
    if not shape.experts:
        setting |= {"top_k": 2, "moe_ffn": shape.ffn}
    if not shape.kv_rank:
        setting["value_dim"] = shape.head_dim
    return setting


def left_out(shape: TransformerShape) -> list[str]:
    """Describes the properties of a shape that the page cannot show."""
    kinds = {
        f"its sliding window of {shape.sliding_window}": shape.sliding_window,
        "experts split otherwise than the rest": shape.expert_tp not in (0, shape.tp),
        "measured routing": not isinstance(shape.routing, str),
        f"experts beyond {_MOST_EXPERTS}": shape.experts > _MOST_EXPERTS,
    }
    return [words for words, has in kinds.items() if has]


def fitted_models(path: Path) -> tuple[DeviceSpec, dict[str, FittedModel]]:
    """Fits a model to the unbatched GEMMs of each dtype in a profile.

    Returns the profile's device, and the models by dtype. Without GEMM rows there are no models.
    The times of all unbatched GEMMs are kept, so that the page can look them up. A model itself is
    fitted to at most _FITTED_ROWS of them, drawn at random with seed 0.

    Raises InputError for the profile of a CPU.
    """
    from quantbench.profile import Profile

    profile = Profile.load(path)
    if profile.device.kind == "cpu":
        what = f"--profile {path} of {profile.device.name}"
        raise InputError("explore", what, "the profile of a GPU")
    table = profile.tables["gemm"]
    found = {}
    for dtype in np.unique(table["dtype"]).tolist():
        of_dtype = table.matching(dtype=dtype, batch=1)
        drawn = np.random.default_rng(0).permutation(len(of_dtype))[:_FITTED_ROWS]
        rows = of_dtype.where(np.sort(drawn))
        model = GemmModel.fit(
            profile.device,
            rows["m"],
            rows["n"],
            rows["k"],
            rows["latency_us"],
            layout=rows["layout"].tolist(),
            dtype=dtype,
        )
        note = f"{dtype} products on {profile.device.name}: {len(of_dtype):,} rows of the profile"
        note = printable(f"{note} {path.name}, others fitted", 200)
        sizes = np.unique(np.stack([of_dtype[name] for name in "mnk"], axis=1), axis=0)
        times = []
        for layout in LAYOUTS:
            answer = profile.gemm(*sizes.T, dtype=dtype, layout=layout)
            times += [answer.latency_us, answer.low_us, answer.high_us]
        by_layout = np.stack(times, axis=1).astype("<f4")
        found[dtype] = FittedModel(model, note, sizes.astype("<i4"), by_layout)
    return profile.device, found
