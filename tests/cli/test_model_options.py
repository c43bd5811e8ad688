"""The options that describe a model: one vocabulary, one set of defaults and one assumed line for
four commands.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from commands import refused, run, run_json

from quantbench.cli.model_options import (
    ShapeOptions,
    assumed_words,
    chosen_model,
    held_and_dims,
)
from quantbench.cli.models import models
from quantbench.cli.predict import PredictOptions, predict_sweep
from quantbench.device import default_attention, known, lookup
from quantbench.errors import InputError, UnsupportedError
from quantbench.latency.model_times import ModelTimes
from quantbench.sweep.axes import with_defaults
from quantbench.workload.presets import preset_names

A100 = lookup("a100-sxm4-80gb")

#: the words that ask each command about a model, and where its JSON keeps what it assumed
ASK = {
    "advise": "advise --gpu a100-sxm4-80gb --top 0",
    "plan": "plan --gpu a100-sxm4-80gb --gpus 16 --gbs 64 --check --tp 8 --pp 2",
    "predict": "predict --gpu a100-sxm4-80gb --dim mbs=1",
    "sweep": "sweep --gpu a100-sxm4-80gb --dim mbs=1 --dry-run",
}  # fmt: skip


def assumed(command: str, words: str) -> list[str]:
    data = run_json(f"{ASK[command]} {words}")
    found: list[str] = data["job"]["assumed"] if command == "plan" else data["assumed"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", ASK)
def test_todays_models_run_flash_attention_and_drop_nothing_out(command: str) -> None:
    words = assumed(command, "--model llama-3-8b")
    assert "flash attention" in words
    assert not any(word.startswith("dropout") or "softmax" in word for word in words)
    assert "seq = 8192 (as llama-3-8b was pre-trained)" in words
    said = run(f"{ASK[command]} --model llama-3-8b")
    assert re.search("^assumed: .*flash attention", said, re.M)


@pytest.mark.parametrize("command", ASK)
def test_a_model_of_2022_runs_as_it_was_trained(command: str) -> None:
    words = assumed(command, "--model bloom-7b1")
    assert {"unfused attention (of bloom-7b1)", "Megatron's fused softmax"} <= set(words)
    assert any(word.startswith("dropout") for word in words)


@pytest.mark.parametrize("command", ASK)
def test_what_is_typed_is_not_assumed(command: str) -> None:
    typed = "--attention unfused --no-dropout --seq 2048 --dtype bf16"
    words = assumed(command, f"--model bloom-7b1 {typed}")
    assert not any(
        part in word for word in words for part in ("attention", "dropout", "seq =", "dtype")
    )


@pytest.mark.parametrize("command", ASK)
def test_a_config_is_read_whole(command: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    keys = {
        "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
    }  # fmt: skip
    config.write_text(json.dumps(keys))
    words = assumed(command, f"--config {config}")
    assert "seq = 8192 (cut from the config's context of 131072)" in words
    assert "sliding window of 4096 ignored: attention over all 8192 tokens" in words
    config.write_text(json.dumps({**keys, "attention_dropout": 0.1}))
    assert any(word.startswith("dropout") for word in assumed(command, f"--config {config}"))
    config.write_text(json.dumps({**keys, "hidden_size": 400_000 * 32}))
    error = refused(f"{ASK[command]} --config {config}")
    assert str(error).startswith(f"config {config}: hidden = 12800000, ")


def test_sizes_alone_are_completed_and_said() -> None:
    shape, words = chosen_model(ShapeOptions(hidden=4096, heads=32), A100)
    assert (shape.layers, shape.vocab, shape.seq, shape.attention) == (26, 50304, 2048, "flash")
    assert words == (
        "flash attention", "no dropout", "one matrix for embedding and logits",
        "layers = 26 (hidden / 160)", "vocab = 50304", "seq = 2048", "dtype = bf16",
    )  # fmt: skip


def test_what_follows_from_a_typed_size_is_said() -> None:
    shape, words = chosen_model(ShapeOptions(model="llama-3-8b", hidden=5120, heads=40), A100)
    assert (shape.kv_heads, shape.ffn) == (40, 17920)
    assert {"kv_heads = heads", "ffn = 17920"} <= set(words)


@pytest.mark.parametrize(
    ("model", "sizes", "kept"),
    [
        ("llama-3-8b", {"hidden": 4096}, {"kv_heads": 8, "head_dim": 128}),
        ("llama-3-8b", {"heads": 32}, {"kv_heads": 8, "head_dim": 128}),
        ("llama-3-8b", {"hidden": 8192}, {"heads": 64, "kv_heads": 16, "head_dim": 128}),
        ("llama-3-8b", {"hidden": 8192, "heads": 32}, {"kv_heads": 8, "head_dim": 256}),
        ("llama-3-8b", {"hidden": 4000}, {"heads": 32, "kv_heads": 8, "head_dim": 125}),
        ("gemma-3-27b", {"hidden": 5888}, {"kv_heads": 16, "head_dim": 128}),
        ("gpt2-xl", {"hidden": 1800}, {"kv_heads": 25, "head_dim": 72}),
    ],
)
def test_heads_of_a_model_stay_grouped_and_as_wide_where_they_can(
    model: str, sizes: dict[str, int], kept: dict[str, int]
) -> None:
    shape, words = chosen_model(ShapeOptions(model=model, **sizes), A100)
    assert {name: getattr(shape, name) for name in kept} == kept
    assert f"kv_heads = {'heads' if shape.kv_heads == shape.heads else shape.kv_heads}" in words
    assert ("head_dim = 128" in words) == (model == "gemma-3-27b")
    narrow = [word for word in words if "no whole heads and kv_heads of" in word]
    assert bool(narrow) == (sizes in ({"hidden": 4000}, {"hidden": 1800}))


def test_a_checked_layout_says_what_of_it_was_not_typed() -> None:
    usual = {"mbs = 1", "ZeRO-1", "full recomputation", "fused Adam", "dgx-a100 as its system"}
    assert usual <= set(assumed("plan", "--model llama-3-8b"))
    typed = "--mbs 2 --zero 0 --recompute none --optimizer adam --cluster jean-zay-a100"
    assert not usual & set(assumed("plan", f"--model llama-3-8b {typed}"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--dim hidden=4096,5120 --model llama-3-8b", "ffn = 14336"),
        ("--dim mbs=1 --hidden 5120 --model llama-3-8b", "ffn = 14336"),
        ("--dim hidden=4096,5120 --model mixtral-8x7b", "moe_ffn = 14336"),
        ("--dim hidden=4096,5120 --model llama-3-8b --ffn 16384", ""),
        ("--dim hidden=4096,5120 --model llama-3-8b --ops qkv", ""),
        ("--dim hidden=1600,1920 --model gpt2-xl", ""),  # ffn stays 4 · hidden
    ],
)
def test_a_models_width_that_stays_as_hidden_varies_is_said(words: str, said: str) -> None:
    output = run(f"predict --gpu a100-sxm4-80gb {words}")
    (assumed,) = re.findall(r"^assumed: (.*)$", output, re.M)
    assert [word for word in assumed.split(", ") if "ffn" in word] == [said] * bool(said)
    assert ("kv_heads = heads / 4" in assumed) == ("gpt2-xl" not in words)


def test_attention_by_device() -> None:
    # V100 has torch's memory-efficient kernel; only Pascal is older.
    others = [spec.name for spec in known() if default_attention(spec) != "flash"]
    assert others == ["p100-pcie-16gb"]


def test_a_lower_bound_is_called_so() -> None:
    assert "lower bound: no communication" in run(f"{ASK['advise']} --model llama-3-8b")
    assert "a lower bound on time" in run(f"{ASK['plan']} --model llama-3-8b")
    found = run_json(f"{ASK['plan']} --model llama-3-8b")["prediction"]
    seconds = found["days_per_trillion_tokens"] * 86400
    assert seconds * found["tokens_per_s"] == pytest.approx(1e12)
    assert found["gpu_hours_per_trillion_tokens"] == pytest.approx(seconds / 3600 * 16)
    assert "restarts" in found["not_counted"]
    advised = run_json(f"{ASK['advise']} --model llama-3-8b")
    assert advised["gpu_hours_note"].startswith("lower bound: ")


def test_experts_of_a_preset_are_swept_advised_and_predicted(tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    counts.write_text("[9, 1, 0, 0, 0, 0, 0, 2]")
    grid = PredictOptions(dim=["tokens=128"], model="mixtral-8x7b", routing=str(counts))
    held, dims = held_and_dims(grid)
    assert (held.experts, held.top_k, held.moe_ffn) == (8, 2, 14336)
    assert held.routing == (9, 1, 0, 0, 0, 0, 0, 2)
    words = assumed_words(grid, with_defaults(held, A100, dims), ("experts_down",), A100)
    assert {"ep = 1", "products of the busiest GPU"} <= set(words)
    counts.write_text('{"0": 1}')
    with pytest.raises(InputError, match=r"--routing: .*expected a list of counts"):
        held_and_dims(grid)
    advised = run_json(f"{ASK['advise']} --model mixtral-8x7b --ep 4 --routing power_law_1.2")
    experts = next(op for op in advised["ops"] if op["op"] == "experts")
    assert [edge["kind"] for edge in experts["edges"]] == ["skew"]
    assert experts["edges"][0]["before"]["distribution"] == "balanced"
    assert advised["missing"] == ["a forward pass only: gradients of experts have no model"]
    _, forecast, _ = predict_sweep(replace(grid, routing=""), ModelTimes(A100))
    assert [op.op.name for op in forecast.ops] == ["experts"]
    with pytest.raises(UnsupportedError, match="gradients of experts have no model"):
        predict_sweep(replace(grid, routing="", direction="both"), ModelTimes(A100))


def test_models_lists_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    models(as_json=False)
    said = capsys.readouterr().out
    for name in preset_names():
        assert f"{name} " in said
    assert "unfused attention, dropout" in next(
        line for line in said.splitlines() if line.startswith("bloom-176b")
    )
    models(as_json=True)
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert tuple(found) == preset_names()
    llama = found["llama-3-8b"]
    assert (llama["layers"], llama["kv_heads"]) == (32, 8)
    assert (llama["ffn"], llama["vocab"]) == (14336, 128256)
    assert "config.json" in llama["source"]


@pytest.mark.parametrize("command", ["advise", "predict"])
def test_a_routing_is_refused_without_experts(command: str) -> None:
    error = refused(f"{ASK[command]} --model llama-3-8b --routing balanced")
    assert error.value == "--routing balanced without experts"
    assert "experts" in run("predict --gpu a100 --dim experts=8 --hidden 4096 --routing balanced")


def test_a_model_typed_with_two_matrices_has_its_published_parameters() -> None:
    words = "--hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --gated --layers 32"
    typed = run(f"{ASK['advise']} {words} --vocab 128256 --untied --top 0")
    assert "shape: 8.03 B parameters" in typed
    assert "shape: 8.03 B parameters" in run(f"{ASK['advise']} --model llama-3-8b --top 0")
    assert "one matrix for embedding and logits" not in typed


def test_cards_with_one_chip_answer_alike() -> None:
    def us(gpu: str) -> float:
        said = run_json(f"predict --gpu {gpu} --dim n=4096 -m 4096 -k 4096 --dtype fp16")
        return float(said["rows"][0]["latency_us"])

    assert us("v100") == us("v100-16gb") == us("v100-32gb")
    assert us("a100-40gb") == pytest.approx(us("a100-80gb"), rel=0.02)
