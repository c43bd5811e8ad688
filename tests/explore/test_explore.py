"""The explorer without a browser: what the command writes and refuses, and the models of a
profile.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import refused, run_json
from known_profile import gemm_row, known_profile, table
from made_runs import HOSTILE
from PIL import Image

from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.explore.javascript import Script, module
from quantbench.explore.page import fitted_models, left_out, write_explorer
from quantbench.explore.trace import Node, call, in_order, inputs
from quantbench.profile import Profile
from quantbench.workload.presets import preset
from tools.guide.explorer import SHOTS, shelf_devices, shows_curve


def content(page: Path) -> dict[str, Any]:
    """The JSON that a page holds."""
    packed = re.search(r'id="data">([^<]*)<', page.read_text(encoding="utf-8"))
    whole = zlib.decompress(base64.b64decode(packed[1]))
    found: dict[str, Any] = json.loads(whole[8 : 8 + int.from_bytes(whole[:4], "little")])
    return found


def test_the_command_writes_a_page_that_loads_nothing(tmp_path: Path) -> None:
    page = tmp_path / "new folder" / "explore.html"
    made = run_json(f"explore --gpu v100-sxm2-16gb --model gpt2-xl -o '{page}'")
    assert made["bytes"] == page.stat().st_size < 5e6
    found = content(page)
    assert [gpu["name"] for gpu in found["gpus"]] == ["v100-sxm2-16gb"]
    assert found["gpus"][0]["entries"][0]["dtype"] == "fp16"
    assert found["setting"]["hidden"] == preset("gpt2-xl").hidden
    text = page.read_text(encoding="utf-8")
    assert not re.search(
        r"<(link|img|iframe)[^>]*(src|href)=.(?!data:)", text.partition("<script")[0]
    )


def test_a_processor_and_another_suffix_are_refused(tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    assert refused(f"explore --gpu h100 -o {tmp_path / 'x.htm'}")
    assert refused(f"explore --gpu ' , ' -o {page}")
    made = known_profile({})
    core = replace(made.device, name="cpu-made-up", kind="cpu", compute_capability=None)
    replace(made, device=core, cliffs=()).save(tmp_path / "cpu.json")
    error = refused(f"explore --profile {tmp_path / 'cpu.json'} -o {page}")
    assert error.expected == "the profile of a GPU"


def test_what_a_page_leaves_out_is_said() -> None:
    assert left_out(preset("deepseek-v3")) == left_out(preset("mixtral-8x7b")) == []
    assert left_out(preset("gpt-oss-120b")) == ["its sliding window of 128"]
    measured = replace(preset("mixtral-8x7b"), routing=(1, 2, 3, 4, 5, 6, 7, 8), tp=2, expert_tp=1)
    assert left_out(measured) == ["experts split otherwise than the rest", "measured routing"]


def test_a_title_is_escaped(tmp_path: Path) -> None:
    page = tmp_path / "explore.html"
    write_explorer(page, [lookup("v100-sxm2-16gb")], preset("gpt2-xl"), title=HOSTILE)
    assert "<script>alert" not in page.read_text(encoding="utf-8").partition('id="data"')[0]


def test_a_profiles_products_are_fitted(tmp_path: Path) -> None:
    rows = [
        gemm_row(64 * i, n, 1024, (20.0 + 2 * i) * n / 4096)
        for n in range(4096, 9216, 512)
        for i in range(1, 4)
    ]
    known_profile({"gemm": table("gemm", rows)}).save(tmp_path / "profile.json")
    device, fitted = fitted_models(tmp_path / "profile.json")
    assert device.name == "a100-sxm4-80gb"
    assert fitted["bf16"].model.rows == 30
    assert "30 rows of the profile" in fitted["bf16"].note
    profile = Profile.load(tmp_path / "profile.json")
    for (m, n, k), times in zip(fitted["bf16"].sizes.tolist(), fitted["bf16"].times, strict=True):
        one = profile.gemm(m, n, k, dtype="bf16", layout="nt")
        assert times[3:6] == pytest.approx((one.latency_us, one.low_us, one.high_us), rel=1e-6)


def test_the_shelf_has_measured_gpus_of_their_usual_format() -> None:
    names = [device.name for device in shelf_devices()]
    assert "h100-sxm5-80gb" in names
    assert "l4-24gb" not in names


def test_numpy_records_its_functions_and_folds_constants() -> None:
    (x,) = inputs("x")
    found: Any = np.where(x > 2.0, np.exp(x * np.log(1.0)), np.maximum(x, 0.0))
    assert isinstance(found, Node)
    assert [node.op for node in in_order([found]) if node.op not in ("input", "constant")] == [
        "greater", "multiply", "exp", "maximum", "where",
    ]  # fmt: skip
    assert found is np.where(x > 2.0, np.exp(x * 0.0), np.maximum(x, 0.0))


def test_reductions_end_one_loop_and_begin_the_next() -> None:
    (x,) = inputs("x")
    table = np.array([[1.0], [2.0], [3.0]])
    over = x * table - (x * table).min(axis=0)
    mean, _ = call("forests[0]", [over.sum(axis=0), over.argmin(axis=0)], 2)
    lines = module({"times": (["x"], [mean])}).splitlines()
    loops = [line for line in lines if line.startswith("for ")]
    assert loops == ["for (let i = 0; i < 3; i++) {"] * 2
    assert sum("forests[0]([" in line for line in lines) == 1
    assert lines[-3].startswith("return [")


def test_plain_python_runs_on_every_way_through_its_conditions() -> None:
    heads, tp, experts = inputs("s.heads", "s.tp", "s.experts")

    def checked() -> Any:
        if heads % tp:
            raise InputError("shape", f"heads = {heads}", f"a multiple of {tp}")
        return max(1, heads // tp) if experts else 0

    script = Script({})
    script.add(
        "objection", lambda: [checked(), ""][1], lambda error: f"{error.value}: {error.expected}"
    )
    script.add("count", checked)
    text = str(script)
    assert (
        "(s.heads - s.tp * Math.floor(s.heads / s.tp)) ? `heads = ${s.heads}: a multiple of ${s.tp}` : ``"
        in text
    )
    count = text.partition("count: ")[2]
    assert "heads = " not in count  # no possible shape comes there
    assert "s.experts ?" in count
    known = Script({(heads % tp): False, experts == 0: False})
    known.add("count", lambda: 1 if experts == 0 else 2)
    assert "count: s => 2" in str(known)


@pytest.mark.parametrize("name", SHOTS)
def test_the_pictures_of_the_page_show_a_curve(name: str) -> None:
    with Image.open(Path(__file__).parents[2] / name) as shot:
        picture = shot.convert("RGB")
    assert shows_curve(picture)
    assert not shows_curve(Image.new("RGB", picture.size, "white"))
