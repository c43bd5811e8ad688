"""The explorer in real browsers: its figures are those of `predict` and `advise`, every control
changes what it should, it asks nothing of the network, complains of nothing and stays accessible.
Skipped without Chromium. QUANTBENCH_EXHAUSTIVE=1: 10,000 products on
each GPU, 200 settings."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np
import pytest
from browser import Browser, Tab, browser, find_browser
from commands import refused, run, run_json
from made_runs import HOSTILE

from quantbench.advice.cost import cost_of
from quantbench.advice.search import Search
from quantbench.advice.space import Space, shapes_near
from quantbench.alignment_rules import runs_without_crash
from quantbench.analysis.blocks import idle_reasons, tile_in_use
from quantbench.analysis.forecast import forecast
from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.explore.page import FittedModel, write_explorer
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.model_times import ModelTimes, best_gemm_model
from quantbench.latency.op_times import (
    CachedTimes,
    OpEstimate,
    correlation_of,
    peak_share,
    total,
)
from quantbench.sweep.axes import Held, parse_axis, with_defaults
from quantbench.units import latency
from quantbench.workload import TransformerShape
from quantbench.workload.ops import LAYOUTS
from quantbench.workload.parameters import parameters
from quantbench.workload.presets import preset

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_browser() is None, reason="no Chromium here (apt-get install chromium)"
    ),
]

GPUS = ("a100-sxm4-80gb", "h100-sxm5-80gb")
EXHAUSTIVE = os.environ.get("QUANTBENCH_EXHAUSTIVE") == "1"
AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
IDLE = """new Promise(done => (function look() {
  document.documentElement.dataset.busy === 'no' ? done(1) : setTimeout(look, 20); })())"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_browser()
    assert path is not None
    with browser(path, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explore") / "explore.html"
    size = write_explorer(path, [lookup(gpu) for gpu in GPUS], preset("llama-3-8b"))
    assert size < 5e6 * len(GPUS)
    return path


@pytest.fixture(scope="module")
def one_tab(opened: Browser, page: Path) -> Iterator[Tab]:
    with opened.tab(page, 1280) as found:
        yield found


@pytest.fixture
def tab(one_tab: Tab) -> Tab:
    """The tab that tests share, as it was when the page was opened."""
    one_tab.evaluate(IDLE)
    one_tab.evaluate(
        "$('reset').click(); lines = page.gpus.map(gpu => gpu.entries[0].id); choose(lines[0])"
    )
    one_tab.evaluate(IDLE)
    return one_tab


def random_products(count: int, seed: int) -> Any:
    """m, n, k, batch and layout, (count, 5), as forward and backward passes have them: any side may
    be the long one, or one whose rows are not aligned."""
    rng = np.random.default_rng(seed)
    sides = np.floor(2 ** rng.uniform(3, 17.5, (count, 3)) / 8) * 8 + rng.integers(1, 9, (count, 3))
    sides = np.where(rng.random((count, 3)) < 0.15, sides, np.ceil(sides / 8) * 8)
    sides[:, 0] = np.where(rng.random(count) < 0.3, rng.integers(1, 300, count), sides[:, 0])
    batch = np.where(rng.random(count) < 0.1, rng.integers(2, 9, count), 1)
    return np.column_stack([sides, batch, np.arange(count) % len(LAYOUTS)])


def check_products(tab: Tab, count: int) -> None:
    """Compares products of every number format, library and layout that a page shows."""
    every = tab.evaluate(
        "page.gpus.flatMap(gpu => gpu.entries.map(one => [gpu.slug, one.dtype, one.library]))"
    )
    for seed, (gpu, dtype, library) in enumerate(every):
        # The last one has its k, below the least that trees see, stored as one above.
        products = np.vstack([random_products(count, seed), [270, 55, 31, 1, 2]])
        m, n, k, batch, layout = products.T
        model = best_gemm_model(lookup(gpu), dtype, library)[0]
        expected = model.predict(
            m, n, k, batch=batch, layout=[LAYOUTS[int(index)] for index in layout]
        )
        found = tab.evaluate(
            f"load(['{gpu}/{dtype}/{library}']), {json.dumps(products.tolist())}.map(product =>"
            f"models.get('{gpu}/{dtype}/{library}').product(...product))"
            ".map(one => [one.us, one.low, one.high])"
        )
        times = np.stack([expected.latency_us, expected.low_us, expected.high_us], axis=1)
        assert np.abs(found / times - 1).max() < 1e-6, (gpu, dtype, library)


def test_products_take_the_time_that_python_predicts(tab: Tab) -> None:
    check_products(tab, 100)


def settings(count: int) -> list[dict[str, Any]]:
    """Random possible settings of the page's controls."""
    draw, found = Random(2), []
    while len(found) < count:
        tp, width = draw.choice([1, 2, 4, 8]), draw.choice([64, 80, 96, 100, 128])
        group = draw.choice([1, 1, 2, 4, 8])
        heads = group * tp * draw.randint(1, 6)
        one = {
            "hidden": heads * width if draw.random() < 0.8 else 8 * draw.randint(64, 1024), "heads": heads,
            "kv_heads": heads // group, "head_dim": width, "ffn": tp * draw.choice([8, 64, 1]) * draw.randint(100, 300),
            "seq": draw.choice([257, 1000, 2048, 4096, draw.randint(1, 5000)]), "mbs": draw.randint(1, 4), "tp": tp,
            "vocab": 128 * tp * draw.randint(50, 260000 // 128 // tp), "layers": draw.randint(1, 80),
            "gated": draw.random() < 0.5, "tied": draw.random() < 0.5, "gate_fused": False,
            "attention": draw.choice(["flash", "unfused"]), "experts": 0, "top_k": 0, "moe_ffn": 0, "ep": 1,
            "shared_ffn": 0, "dense_layers": 0, "kv_rank": 0, "q_rank": 0, "rope_dim": 0, "value_dim": 0,
        }  # fmt: skip
        one["gate_fused"] = bool(one["gated"]) and draw.random() < 0.5
        if draw.random() < 0.25:
            ep, local = draw.choice([1, 2, 8]), draw.randint(1, 16)
            routing = draw.choice(["balanced", "power_law_1.01", "power_law_1.2"])
            one |= {
                "experts": ep * local,
                "top_k": draw.randint(1, min(8, ep * local)),
                "ep": ep,
                "routing": routing,
            }
            one |= {
                "moe_ffn": tp * 8 * draw.randint(16, 300),
                "shared_ffn": tp * 8 * draw.choice([0, 100, 256]),
            }
            one["dense_layers"] = draw.choice([0, min(3, int(one["layers"]) - 1)])
        if draw.random() < 0.25:
            one |= {
                "kv_rank": 512,
                "q_rank": draw.choice([0, 1536]),
                "rope_dim": 64,
                "value_dim": draw.choice([96, 128]),
            }
            one["kv_heads"] = heads
        found.append(one)
    return found


def check_settings(tab: Tab, gpu: str, dtype: str, count: int) -> None:
    """Compares every op of random settings, and their sums, with what `predict` and `advise`
    print.
    """
    device = lookup(gpu)
    made = settings(count)
    identity = f"{gpu}/{dtype}/{best_gemm_model(device, dtype)[0].library}"
    script = (
        f"(() => {{ load(['{identity}']); const t = models.get('{identity}');"
        f"return {json.dumps(made)}.map(s => {{ s = {{...s, direction: 'both'}}; const sum = t.layer(s);"
        "return {runs: !t.crash(s), sum: [sum.us, sum.low, sum.high, sum.share], parameters: parameters(s),"
        "ops: ops(s).map(op => { const one = t.estimate(op), waste = t.waste(op);"
        "return {name: op.label, us: one.us, text: latency(one.us), low: one.low, high: one.high,"
        "share: t.share(op, one.us), why: t.reasons(op),"
        "waste: waste && waste.us, words: waste && waste.words}})}})})()"
    )
    answers = tab.evaluate(script)
    known = [CachedTimes(ModelTimes(device), softmax="megatron") for _ in range(2)]
    for one in made:
        known[one["experts"] > 0].ask(
            op.workload for op in TransformerShape(**one, dtype=dtype).modelled_ops()
        )
    for one, found in zip(made, answers, strict=True):
        shape = TransformerShape(**one, dtype=dtype)
        times = known[shape.experts > 0]  # an estimate without measurements widens all later ones
        cost = cost_of(shape, times)
        assert found["parameters"] == parameters(shape)
        assert found["runs"] == runs_without_crash(shape, library="", device=device)
        assert [op["name"] for op in found["ops"]] == [op.op.label for op in cost.ops]
        others = {
            "logits",
            *(("mlp_up", "mlp_gate", "mlp_up_gate", "mlp_down") if shape.experts else ()),
        }
        layer = [op for op in cost.ops if op.op.name not in others]
        ops = [
            OpEstimate(type(op.op)(op.op.name, op.op.phase, op.op.workload, 1), op.latency)
            for op in layer
        ]
        whole = total(ops, correlation_of(times))
        products = [op for op in ops if op.op.name != "softmax"]
        shares = [
            (peak_share(op.op.workload, op.estimate.latency_us, device) or 0) * op.total_us
            for op in products
        ]
        expected = (whole.latency_us, whole.low_us, whole.high_us, sum(shares) / whole.latency_us)
        assert found["sum"] == pytest.approx(expected, rel=1e-5)
        for own, op in zip(found["ops"], cost.ops, strict=True):
            estimate, work = op.latency, op.op.workload
            share = peak_share(work, estimate.latency_us, device)
            times_us = (estimate.latency_us, estimate.low_us, estimate.high_us)
            assert (own["us"], own["low"], own["high"]) == pytest.approx(times_us, rel=1e-5)
            assert own["text"] in {
                latency(x * estimate.latency_us) for x in (1 - 1e-5, 1, 1 + 1e-5)
            }
            assert own["share"] == pytest.approx(share, rel=1e-5)
            why = idle_reasons(work, device, tile_in_use(device, work.dtype, op.launch), share)
            assert own["why"] == [reason.words for reason in why]
            assert (own["waste"] or 0.0) == pytest.approx(
                op.findings[0].waste_us if op.findings else 0.0, abs=1e-4 * estimate.latency_us
            )
            if op.findings and own["waste"] is not None:
                assert own["words"] == op.findings[0].edge.words


@pytest.mark.parametrize(
    ("gpu", "dtype"),
    [(GPUS[0], "bf16"), *((GPUS[1], dtype) for dtype in ("bf16", "fp8", "fp8_block"))],
)
def test_settings_cost_what_predict_and_advise_print(tab: Tab, gpu: str, dtype: str) -> None:
    check_settings(tab, gpu, dtype, 20)


def test_what_is_impossible_is_said_in_the_words_of_python(tab: Tab) -> None:
    draw, said = Random(3), set()
    of_all = ["heads", "kv_heads", "ffn", "vocab", "tp"]
    for one in settings(80):
        more = [*(["top_k", "moe_ffn", "ep", "dense_layers"] if one["experts"] else [])]
        more += ["rope_dim"] if one["kv_rank"] else []
        changed = {**one, draw.choice([*of_all, *more]): draw.randint(1, 70)}
        expected = ""
        try:
            TransformerShape(**changed)
        except InputError as error:
            expected = f"{error.value}; expected {error.expected}"
        assert tab.evaluate(f"objection({json.dumps(changed)})") == expected, changed
        said.add(expected.partition("; expected")[2][:12])
    assert len(said) >= 6


def type_in(tab: Tab, name: str, value: object, event: str = "change") -> None:
    change = f"e.value = {json.dumps(str(value))}; e.dispatchEvent(new Event('{event}'));"
    tab.evaluate(f"(e => {{ {change} }})(document.getElementById('{name}'))")
    tab.evaluate(IDLE)


def state(tab: Tab) -> dict[str, Any]:
    return dict(tab.evaluate("state"))


def seen(tab: Tab) -> dict[str, str]:
    names = [
        "answer",
        "compared",
        "ops",
        "experts-text",
        "c-predict",
        "c-sweep",
        "c-advise",
        "better",
        "shown",
        "tiles-text",
        "wrong",
    ]
    return tab.evaluate(
        f"Object.fromEntries({json.dumps(names)}.map(id => [id, document.getElementById(id).textContent]))"
    )


def test_every_control_changes_what_it_should(tab: Tab, opened: Browser, page: Path) -> None:
    moves = [
        ("n-hidden", 5120, "ops"), ("n-heads", 64, "ops"), ("n-kv_heads", 32, "ops"), ("n-ffn", 13824, "ops"),
        ("n-seq", 257, "ops"), ("n-mbs", 2, "ops"), ("n-tp", 2, "ops"), ("n-vocab", 50304, "ops"),
        ("n-layers", 40, "c-advise"), ("n-head_dim", 64, "ops"), ("n-experts", 16, "experts-text"),
        ("n-top_k", 4, "experts-text"), ("n-ep", 4, "experts-text"), ("n-moe_ffn", 2048, "ops"),
        ("routing", "power_law_1.2", "experts-text"), ("n-shared_ffn", 1024, "ops"), ("n-dense_layers", 1, "ops"),
        ("n-experts", 0, "ops"), ("n-kv_rank", 512, "ops"), ("n-q_rank", 1536, "ops"), ("n-rope_dim", 32, "ops"),
        ("n-value_dim", 96, "ops"), ("n-kv_rank", 0, "ops"),
        ("attention", "unfused", "ops"), ("axis", "seq", "c-sweep"), ("direction", "both", "ops"),
        ("dtype", "fp16", "answer"), ("gpu", "h100-sxm5-80gb", "answer"), ("dtype", "fp8", "answer"),
        ("preset", "gpt2-xl", "ops"),
    ]  # fmt: skip
    before = seen(tab)
    for name, value, changes in moves:
        type_in(tab, name, value)
        now = seen(tab)
        assert now[changes] != before[changes], name
        assert now["wrong"] == "", name
        before = now
    type_in(tab, "r-ffn", 8192, "input")
    assert "--ffn 8192" in seen(tab)["c-predict"]
    for name, what in (
        ("gated", "ops"),
        ("gate_fused", "ops"),
        ("lock-ffn", "c-advise"),
        ("add", "shown"),
    ):
        tab.evaluate(f"document.getElementById('{name}').click()")
        tab.evaluate(IDLE)
        assert seen(tab)[what] != before[what], name
        before = seen(tab)
    with opened.tab(page, 1280, fragment="#heads=7&kv_heads=3") as again:
        again.evaluate(IDLE)
        assert (
            "kv_heads = 3; expected a divisor of heads = 7. Change a size, or start again."
            in seen(again)["wrong"]
        )
        assert again.shown.problems == []
    fragment = tab.evaluate("location.hash")
    with opened.tab(page, 1280, fragment=fragment) as again:
        again.evaluate(IDLE)
        assert seen(again) == before
    heads = tab.evaluate("[state.heads, state.head_dim, state.kv_heads]")
    for typed in ("5000", "4096", "forty", "0", "40.5", ""):
        type_in(tab, "n-hidden", typed)
        assert tab.evaluate("[state.heads, state.head_dim, state.kv_heads]") == heads
        wrong = seen(tab)["wrong"]
        assert (
            wrong == ""
            if typed in ("5000", "4096")
            else "a whole number of at least 1 was expected" in wrong
        )
    type_in(tab, "n-tp", 3)
    assert "With tp: vocab" in tab.evaluate("document.getElementById('followed').textContent")
    type_in(tab, "n-tp", 7)
    assert "heads = 25 with tp = 7; expected heads divisible by tp: 21 or 28" in seen(tab)["wrong"]
    tab.evaluate("document.getElementById('reset').click()")
    tab.evaluate(IDLE)
    assert seen(tab)["wrong"] == ""


def test_the_curve_over_hidden_is_that_of_its_products(tab: Tab) -> None:
    type_in(tab, "n-hidden", 4100)
    type_in(tab, "preset", "llama-3-8b")
    times = CachedTimes(ModelTimes(lookup(GPUS[0])), softmax="megatron")
    grid = (parse_axis("hidden=3072:5120:64"),)
    ops = ("qkv", "proj", "mlp_up", "mlp_gate", "mlp_down")
    held = Held(ops=ops, heads_per_kv_head=4, head_dim=128, ffn=14336, gated=True, seq=8192)
    rows = forecast(grid, with_defaults(held, times.device), times).rows
    drawn = tab.evaluate("[...draw.curves.get(active)].map(([x, one]) => [x, one.us])")
    curve = dict(map(tuple, drawn))
    same = {row.axes["hidden"]: row.latency_us for row in rows if row.axes["hidden"] in curve}
    assert len(same) > 20
    assert {hidden: curve[hidden] for hidden in same} == pytest.approx(same, rel=1e-5)
    # Its drops are named by tiles, waves, alignment or another kernel, never by heads.
    causes = tab.evaluate(
        "[...document.querySelectorAll('#cliffs li')].map(one => one.textContent)"
    )
    assert causes
    assert all(
        re.search("wave|pads to|aligned|kernel", cause) and "heads" not in cause for cause in causes
    ), causes


def test_heads_follow_hidden_at_their_width_unless_they_are_kept(tab: Tab) -> None:
    type_in(tab, "preset", "llama-3-8b")
    type_in(tab, "n-hidden", 5120)
    assert tab.evaluate("[state.heads, state.kv_heads, state.head_dim]") == [40, 10, 128]
    type_in(tab, "preset", "llama-3-8b")
    tab.evaluate("document.getElementById('lock-heads').click()")
    type_in(tab, "n-hidden", 5120)
    assert tab.evaluate("[state.heads, state.kv_heads, state.head_dim]") == [32, 8, 160]
    said = "[state.heads, $('followed').textContent, $('rows').textContent]"
    type_in(tab, "n-hidden", 5000)
    heads, followed, rows = tab.evaluate(said)
    assert heads == 32
    assert "No whole number of heads" in followed
    assert "5120, not" in rows
    # The slider shows a width between its steps.
    type_in(tab, "n-head_dim", 125)
    assert tab.evaluate("$('r-head_dim').value") == "125"


def test_a_better_shape_is_taken_over_by_a_click(tab: Tab) -> None:
    type_in(tab, "n-seq", 2049)
    type_in(tab, "n-ffn", 14000)
    change = tab.evaluate("document.querySelector('#better td').textContent")
    tab.evaluate("document.querySelector('#better button').click()")
    tab.evaluate(IDLE)
    for part in change.split(", "):
        name, _, _, value = part.split(" ")
        assert tab.evaluate(f"state.{name}") == int(value)


def test_what_a_link_says_that_the_page_does_not_know_is_named(opened: Browser, page: Path) -> None:
    wrong = [
        "hiden=5000",
        "hidden=4k",
        "seq=",
        "axis=depth",
        "gated=yes",
        "detail=h900/bf16/vllm",
        "constructor=1",
    ]
    listed = {"lines=h900/bf16/vllm": "a100-sxm4-80gb/bf16/sglang", "keep=depth": "ffn"}
    fragment = "&".join(
        [*wrong, *(f"{unknown},{known}" for unknown, known in listed.items()), "mbs=2", "mbs=4"]
    )
    unknown = "document.getElementById('unknown').textContent"
    with opened.tab(page, 1280, fragment=f"#{fragment}") as tab:
        tab.evaluate(IDLE)
        assert all(one in tab.evaluate(unknown) for one in (*wrong, *listed)), tab.evaluate(unknown)
        assert "a100" not in tab.evaluate(unknown)
        assert tab.evaluate("[state.hidden, state.axis, state.gated, state.mbs, locks.ffn, lines]") == [
            preset("llama-3-8b").hidden, "hidden", True, 4, True, ["a100-sxm4-80gb/bf16/sglang"],
        ]  # fmt: skip
        tab.evaluate("location.hash = '#seq=4096'")
        tab.evaluate("new Promise(done => setTimeout(done, 50))")
        tab.evaluate(IDLE)
        assert tab.evaluate(unknown) == ""
        assert tab.shown.problems == []


@pytest.mark.parametrize(
    ("width", "dark", "text", "fragment"),
    [
        (400, False, 100, "#attention=unfused&seq=2050&gated=0&direction=both"),
        (
            1280,
            True,
            200,
            "#experts=8&ep=4&axis=moe_ffn&routing=power_law_1.2&detail=h100-sxm5-80gb/bf16/vllm",
        ),
        (2560, False, 100, "#seq=257&axis=seq"),
    ],
)
def test_it_fits_asks_nothing_of_the_network_and_complains_of_nothing(
    opened: Browser, page: Path, width: int, dark: bool, text: int, fragment: str
) -> None:
    with opened.tab(page, width, dark=dark, fragment=fragment) as tab:
        tab.evaluate(f"document.documentElement.style.fontSize = '{text}%'")
        tab.evaluate(IDLE)
        assert tab.shown.problems == []
        assert [
            url.partition("#")[0] for url in tab.shown.requests if not url.startswith("data:")
        ] == [page.as_uri()]
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        if AXE.is_file():
            found = violations(tab)
            assert found == []


@pytest.mark.parametrize(
    ("model", "changes", "locks"),
    [
        ("llama-3-8b", {"ffn": 14344, "tp": 2, "dtype": "fp8"}, {}),
        ("llama-3-8b", {"seq": 2049, "tp": 2}, {"ffn": True}),
        ("bloom-176b", {"seq": 2049, "tp": 8}, {"layers": True}),
        ("gpt2-xl", {"seq": 1000}, {}),
        (
            "llama-3-8b",
            {"hidden": 5000, "heads": 40, "head_dim": 125, "ffn": 20000, "tp": 4},
            {"hidden": True},
        ),
        ("qwen3-30b-a3b", {"seq": 1000, "ep": 8}, {"vocab": True}),
        ("mixtral-8x7b", {"seq": 4096, "top_k": 4, "moe_ffn": 1792, "ep": 8}, {}),
        ("deepseek-v3", {"tp": 4, "ep": 16, "mbs": 2}, {}),
        ("gpt-oss-120b", {"ep": 4}, {}),
        ("gemma-3-27b", {"tp": 2}, {}),
    ],
)
def test_better_shapes_are_those_of_advise(
    tab: Tab, model: str, changes: dict[str, Any], locks: dict[str, bool]
) -> None:
    shape = replace(preset(model), **changes)
    space = Space(keep=tuple(locks))
    times = CachedTimes(ModelTimes(lookup(GPUS[1])), softmax="megatron")
    runs = partial(runs_without_crash, library="", device=lookup(GPUS[1]))
    found = tab.evaluate(
        f"state = {{...page.setting, ...page.presets['{model}'], ...{json.dumps(changes)}}};"
        f"locks = {json.dumps(locks)}; choose(page.gpus[1].entries.find(one => one.dtype === '{shape.dtype}').id)"
        ", [...near(state, locks)].map(one => NAMES.map(name => one.s[name]))"
    )
    names = tab.evaluate("NAMES")
    expected = {one for shapes in shapes_near(shape, space).values() for one in shapes}

    # What the page offers in case that experts or latent attention are switched on.
    offered = {} if shape.experts else {"top_k": 2, "moe_ffn": preset(model).ffn}
    offered |= {} if shape.kv_rank else {"value_dim": preset(model).head_dim}

    def sizes(one: TransformerShape) -> tuple[int, ...]:
        return tuple(offered.get(name, getattr(one, name)) for name in names)

    assert {tuple(one) for one in found} == {sizes(one) for one in expected if one.experts <= 1024}
    tab.evaluate(IDLE)
    listed = tab.evaluate(
        "(search => { let step; do step = search.next(); while (!step.done); return step.value.map(one =>"
        "[NAMES.map(name => one.s[name]), one.gain, one.low, one.high]); })(better(models.get(active)))"
    )
    assert ("It crashes in " in seen(tab)["compared"]) is not runs(shape)
    near = Search(shape, times, space, runs)
    alike = {sizes(one.shape) for one in near.alike()}
    best = {sizes(one.shape): one for one in (*near.best(1000), *near.alike(), *near.single())}
    ranked = sorted(best.values(), key=lambda one: (not one.sure, -one.gain))
    first = [one for i, one in enumerate(ranked) if i < 5 or sizes(one.shape) in alike]
    assert listed
    assert [tuple(one[0]) for one in listed] == [sizes(one.shape) for one in first]
    for (_, *gain), one in zip(listed, first, strict=True):
        assert gain == pytest.approx((one.gain, one.low, one.high), abs=1e-5)


DEEPSEEK = {"ep": 8, "keep": "experts", **{name: getattr(preset("deepseek-v3"), name) for name in (
    "hidden", "heads", "head_dim", "ffn", "vocab", "layers", "experts", "top_k", "moe_ffn", "shared_ffn",
    "dense_layers", "kv_rank", "q_rank", "rope_dim", "value_dim",
)}}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        "seq=257&axis=seq",
        "attention=unfused&direction=both",
        "experts=8&ep=2&axis=ep",
        "vocab=50257&axis=vocab&direction=both",
        urlencode(DEEPSEEK),
        "gate_fused=1",
        "vocab=4194304",
    ],
)
def test_the_copied_commands_run_and_say_the_same(tab: Tab, change: str) -> None:
    tab.evaluate(f"location.hash += '&{change}'")
    tab.evaluate("new Promise(done => setTimeout(done, 50))")
    tab.evaluate(IDLE)
    taken = {
        name: str(int(value)) if isinstance(value, bool) else str(value)
        for name, value in state(tab).items()
    }
    assert {
        name: value for name, value in parse_qsl(change) if name != "keep"
    }.items() <= taken.items()
    names = ("predict", "advise", "sweep")
    lines = {name: seen(tab)[f"c-{name}"].removeprefix("quantbench ") for name in names}
    said = run_json(lines["predict"])
    assert " # " not in seen(tab)["c-predict"]
    listed = "[...layerOf(state), ...ops(state).filter(op => op.name === 'logits')]"
    ops = tab.evaluate(f"{listed}.map(op => [op.label, models.get(active).estimate(op).us])")
    found = said["rows"][0]["ops"]
    assert [(one["op"], pytest.approx(one["latency_us"], rel=1e-5)) for one in found] == [
        tuple(one) for one in ops
    ]
    # The page leaves logits out that are too wide for a prediction, and says so; `advise` refuses
    # them.
    wide = "Logits of" in seen(tab)["compared"]
    if wide:
        assert refused(lines["advise"])
    else:
        run(lines["advise"])
    # A sweep would measure; that its grid has points is what the page can promise.
    run(f"{lines['sweep']} --dry-run --gpu {GPUS[0]}")


def violations(tab: Tab) -> list[str]:
    """What axe-core finds against WCAG 2 (A and AA): contrast, labels, roles."""
    tab.evaluate(AXE.read_text(encoding="utf-8") + ";0")
    told = "v.id + ': ' + n.html.slice(0, 120) + ' ' + n.failureSummary"
    script = f"axe.run().then(r => r.violations.flatMap(v => v.nodes.map(n => {told})))"
    return list(tab.evaluate(script))


def test_hostile_names_are_text(opened: Browser, tmp_path: Path) -> None:
    device, path = lookup("a100-sxm4-80gb"), tmp_path / "explore.html"
    sizes, times = np.array([[640, 512, 256]], dtype="<i4"), np.arange(1, 10, dtype="<f4")[None]
    hostile = FittedModel(GemmModel.prior(device, dtype="bf16"), HOSTILE, sizes, times)
    write_explorer(path, [device], preset("gpt2-xl"), title=HOSTILE, fitted={"bf16": hostile})
    with opened.tab(
        path, 1280, fragment="#hidden=<img src=x onerror=alert(1)>&lines=<b>&keep=<i>&axis=<u>"
    ) as tab:
        tab.evaluate(IDLE)
        assert tab.shown.problems == []
        assert HOSTILE.strip()[:20] in tab.evaluate("document.body.innerText")
        assert tab.evaluate("document.querySelectorAll('img, b, i, u').length") == 0
        # What a profile has measured is looked up, by layout.
        looked = (
            "(one => [one.us, one.low, one.high])(models.get(active).product(640, 512, 256, 1, 2))"
        )
        assert tab.evaluate(looked) == [7, 8, 9]


def test_sixty_moves_leave_no_memory_behind(tab: Tab) -> None:
    script = """(async () => { for (let i = 0; i < 60; i += 2) {
        set('seq', 1024 + 64 * (i % 20)); await new Promise(done => setTimeout(done)); } })()"""
    sizes = []
    for _ in range(3):
        tab.evaluate(script)
        tab.evaluate(IDLE)
        tab.browser._ask("HeapProfiler.collectGarbage", tab.session)
        sizes.append(tab.evaluate("performance.memory.usedJSHeapSize"))
    assert sizes[2] < sizes[1] * 1.1 + 1e6
