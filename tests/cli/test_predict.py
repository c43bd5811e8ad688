"""`quantbench predict`: a sweep without hardware, with its intervals and reasons."""

import re
from typing import Any

import numpy as np
import pytest
from commands import run, run_json

from quantbench.advice.advise import advise
from quantbench.cli.predict import PredictOptions, predict_sweep
from quantbench.device import default_dtype, lookup
from quantbench.device.registry import known
from quantbench.device.spec import DeviceSpec
from quantbench.latency.estimate import Estimate
from quantbench.latency.gemm.cost_model import Sizes
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.op_times import UNALIGNED_NOTE
from quantbench.units import percent
from quantbench.workload import TransformerShape


def test_the_sawtooth_of_an_a100() -> None:
    # 256×128 tiles on 108 SMs: 2048 × 1664 are 8 × 13 = 104 tiles, one wave; 2048 × 1792 are 112,
    # two.
    answer = run_json("predict --gpu a100-sxm4-80gb --dim n=1536,1664,1792,2048 --m 2048 --k 4096")
    found = answer["rows"]
    shares = [row["peak_share"] for row in found]
    assert shares[2] < 0.8 * shares[1]  # the wave edge
    assert shares[3] > shares[2]  # and up the next tooth
    for row in found:
        assert row["low_us"] < row["latency_us"] < row["high_us"]
        assert 0 < row["peak_share"] < 1
        assert row["ops"][0]["bound"] == "compute"


def test_a_rate_that_falls_with_the_measured_rows_is_told_apart_from_tiles() -> None:
    words = "predict --gpu gb200-186gb --dim m=2048,16384 --n 8192 --k 8192"
    found = run_json(words)["rows"]
    assert found[1]["peak_share"] < 0.8 * found[0]["peak_share"]
    ensemble = GemmModel.best("gb200-186gb").ensemble
    for row, m in zip(found, (2048.0, 16384.0), strict=True):
        alone = ensemble.physics(Sizes.of(*(np.array([size]) for size in (m, 8192.0, 8192.0))))
        expected = max(0.0, row["latency_us"] / float(np.exp(alone[0])) - 1)
        assert row["slower_than_best_kernel"] == pytest.approx(expected, abs=1e-6)
    said = " ".join(run(words).split())
    assert "near these are slower than the best kernel of the cost model" in said
    assert f"a lower clock): m = 16384 ({percent(found[1]['slower_than_best_kernel'])})" in said
    layers = run_json("predict --gpu gb200-186gb --dim hidden=8192 --mbs 8")["rows"]
    assert [row["slower_than_best_kernel"] for row in layers] == [0.0]


def test_table_in_words() -> None:
    said = run("predict --gpu a100-sxm4-80gb --dim hidden=4096,4224")
    words = "library = sglang (the default: the largest table of 3)"
    assert said.splitlines()[0] == f"a100-sxm4-80gb: predicted, nothing is run; {words}"
    assert "fitted on" in said
    assert "measured shapes of SGLang 0.5.10" in said
    for word in ("low – high", "TFLOP/s", "of peak", "tile", "waves", "bound", "% idle"):
        assert word in said
    assert "measure it: quantbench sweep --dim hidden=4096,4224" in said


def test_one_row_more_behind_the_edge_of_a_wave() -> None:
    # 12288 columns are 48 tiles of 256: m = 256 fills 96 of 108 SMs, and one row more needs a
    # second wave.
    words = "predict --gpu a100-sxm4-80gb --dim m=100,256,300,384 --n 12288 --k 4096"
    found = run_json(words)["rows"]
    rises = [row["rise_at_next_m"] for row in found]
    assert rises[1]["low"] < rises[1]["share"] < rises[1]["high"]
    assert rises[1]["share"] > 0.3
    assert all(rises[i]["share"] < 0.1 for i in (0, 2, 3))
    assert "one row more costs over 10 % (rise, 90 % interval): m = 256 (" in run(words)


def test_rises_are_told_only_along_m_of_measured_gpus() -> None:
    edges = "--n 4096 --k 4096"
    quiet = run(f"predict --gpu a100-sxm4-80gb --dim m=256 {edges}")
    assert "no cliff is predicted behind these m: one row more costs at most 10 %" in quiet
    for words in (
        f"predict --gpu v100s-pcie-32gb --dim m=256 {edges}",
        "predict --gpu a100 --dim hidden=4096",
    ):
        assert "one row more" not in run(words)
        found = run_json(words)["rows"]
        assert all(row["rise_at_next_m"] is None for row in found)
    many = run("predict --gpu a100 --dim m=256:4096:128 --n 12288 --k 4096")
    assert " more\n" in many.split("(rise, 90 % interval): ")[1]


def test_a_gpu_without_a_model_says_so_and_is_less_sure() -> None:
    words = "--dim hidden=4096 --dtype fp16"
    known, unknown = (
        run_json(f"predict --gpu a100-sxm4-80gb {words}"),
        run_json(f"predict --gpu v100s-pcie-32gb {words}"),
    )
    assert any("nobody measured fp16 on v100s-pcie-32gb" in note for note in unknown["notes"])
    assert any("as the bf16 that was measured" in note for note in known["notes"])

    def width(answer: dict[str, Any]) -> float:
        row = answer["rows"][0]
        return float(row["high_us"] / row["low_us"])

    assert width(unknown) > 1.3 > width(known)


def test_layers_with_attention_and_backward() -> None:
    answer = run_json(
        "predict --gpu h200-sxm-141gb --dim mbs=1,2 --hidden 4096 --heads 32 --direction both"
    )
    first, second = answer["rows"]
    assert {"qkv", "qkv.dgrad", "qkv.wgrad", "attention", "attention.backward", "logits"} <= {
        op["op"] for op in first["ops"]
    }
    assert 1.6 < second["latency_us"] / first["latency_us"] < 2.2
    logits = [op for op in first["ops"] if op["op"].startswith("logits")]
    layer = [op for op in first["ops"] if op not in logits]
    assert first["latency_us"] == pytest.approx(sum(op["latency_us"] for op in layer))
    assert first["logits_us"] == pytest.approx(sum(op["latency_us"] for op in logits))
    assert not {op["op"] for op in layer} & {"scores", "softmax", "context"}


def test_a_row_is_one_layer_whatever_the_model() -> None:
    words = "predict --gpu a100-sxm4-80gb --dim tp=1 --hidden 4096 --heads 32 --seq 8192"
    said = run(words)
    assert "assumed: flash attention, mbs = 1, vocab = 50304, dtype = bf16" in said
    assert (
        "a row sums qkv + attention + proj + mlp_up + mlp_down of one layer; logits, once per model, are not in it"
        in said
    )
    # OPT-66B has 64 layers; a row of it is one of them.
    model = run_json("predict --gpu a100-sxm4-80gb --dim mbs=1 --model opt-66b")
    (row,) = model["rows"]
    assert {op["count"] for op in row["ops"]} == {1}
    assert "unfused attention (of opt-66b)" in model["assumed"]
    assert {"scores", "softmax", "context"} <= {op["op"] for op in row["ops"]}
    (alone,) = run_json("predict --gpu a100-sxm4-80gb --dim vocab=50304")["rows"]
    assert (alone["logits_us"], [op["op"] for op in alone["ops"]]) == (None, ["logits"])


def test_a_layers_routed_products_are_one_op() -> None:
    words = "predict --gpu h100 --model mixtral-8x7b --dim tokens=4096"
    named = run(f"{words} --ops experts")
    assert (
        "--ops experts_up,experts_up_gate,experts_down,permute,unpermute" in named
    )  # the sweep that measures them
    assert "library = vllm (the default: the largest table of 3); experts: trtllm" in named
    assert "experts: " not in run(f"{words} --ops proj")
    assert "experts: " not in run(f"{words} --library vllm")
    usual, own = (run_json(f"{words} {more}")["rows"] for more in ("", "--ops proj,experts"))
    assert [op["op"] for op in usual[0]["ops"]] == ["experts"]
    assert [op["op"] for op in own[0]["ops"]] == ["proj", "experts"]


def op_estimates(spec: DeviceSpec, shape: TransformerShape) -> dict[str, Estimate]:
    ops = shape.ops()
    return dict(
        zip(
            (op.label for op in ops),
            ModelTimes(spec).estimates([op.workload for op in ops]),
            strict=True,
        )
    )


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_eager_attention_beside_narrow_linear_layers_runs_in_bf16(dtype: str) -> None:
    h100 = lookup("h100-sxm5-80gb")
    narrow, wide = (
        op_estimates(
            h100, TransformerShape(hidden=4096, heads=32, seq=2048, dtype=of, attention="unfused")
        )
        for of in (dtype, "bf16")
    )
    attention = [
        label for label in narrow if label.split(".")[0] in ("scores", "softmax", "context")
    ]
    assert len(attention) == 8
    assert [narrow[label] for label in attention] == [wide[label] for label in attention]
    qkv, of_bf16 = narrow["qkv"], wide["qkv"]
    assert qkv != of_bf16
    assert (
        "fitted on" if dtype == "fp8" else f"nobody measured {dtype} on {h100.name}"
    ) in qkv.note
    assert "fitted on" in of_bf16.note


def test_waves_agree_with_the_reasons() -> None:
    _, found, _ = predict_sweep(
        PredictOptions(dim=["m=2688"], n="4096", k="4096"), ModelTimes(lookup("a100-sxm4-80gb"))
    )
    (row,) = found.rows
    assert str(row.worst.estimate.launch.tile) == "128x256"
    # 21 · 16 tiles on 108 SMs.
    assert row.worst.estimate.waves == 4
    assert row.reasons[0].startswith("wave 4 of 4 is 11 % full: 22 % idle")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [spec for spec in known() if spec.kind == "cuda"], ids=lambda spec: spec.name
)
def test_no_product_is_idle_where_it_is_predicted_to_compute(spec: DeviceSpec) -> None:
    sites = dict.fromkeys(spec.peak_tflops, ((4096, 4096),))
    sites[default_dtype(spec)] = ((4096, 4096), (12288, 4096), (5120, 1024), (1032, 8192))
    for dtype, widths in sites.items():
        for n, k in widths:
            arguments = PredictOptions(dim=["m=128:4096:32"], n=str(n), k=str(k), dtype=dtype)
            _, found, _ = predict_sweep(arguments, ModelTimes(spec))
            assert len(found.rows) == 125
            for row in found.rows:
                said = [re.fullmatch(r".*: ([0-9.]+) % idle.*", reason) for reason in row.reasons]
                idle = [float(match[1]) / 100 for match in said if match]
                # The words round to two digits.
                assert all(row.peak_share <= 1 - share + 0.005 for share in idle), row
                if any(reason.startswith("wave") for reason in row.reasons):
                    assert row.worst.estimate.waves is not None


def test_waves_are_stated_on_an_a100_and_not_where_they_are_refuted() -> None:
    def stated(gpu: str) -> list[int | None]:
        _, found, _ = predict_sweep(
            PredictOptions(dim=["m=128:4096:32"], n="4096", k="4096"), ModelTimes(lookup(gpu))
        )
        assert any(row.reasons for row in found.rows)
        return [row.worst.estimate.waves for row in found.rows]

    assert sum(waves is not None for waves in stated("a100-sxm4-80gb")) > 100
    for gpu in ("h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "v100s-pcie-32gb"):
        assert set(stated(gpu)) == {None}
    table = run("predict --gpu h100-sxm5-80gb --dim m=512 --n 4096 --k 4096")
    assert "wave " not in table
    assert "52 % idle" not in table


@pytest.mark.parametrize("gpu", ["a100-sxm4-80gb", "v100s-pcie-32gb"])
def test_predict_answers_as_advise_does(gpu: str) -> None:
    """Rows of 2050 elements: Megatron's fused softmax refuses them, and the batched products are
    unaligned.
    """
    shape = TransformerShape(
        hidden=4096,
        heads=32,
        seq=2050,
        vocab=50304,
        attention="unfused",
        dtype=default_dtype(lookup(gpu)),
    )
    cost = advise(shape, ModelTimes(lookup(gpu)), top=0).cost
    words = "--hidden 4096 --heads 32 --attention unfused --vocab 50304 --direction both"
    answer = run_json(f"predict --gpu {gpu} --dim seq=2050 {words}")
    (row,) = answer["rows"]
    predicted = {op["op"]: op["latency_us"] for op in row["ops"]}
    assert predicted == {one.op.label: one.latency.latency_us / one.op.count for one in cost.ops}
    assert any(reason.startswith(UNALIGNED_NOTE) for reason in answer["unmeasured"])


def test_unaligned_products_that_nobody_measured_say_so_first() -> None:
    said = run("predict --gpu h100 --dim n=4096,4098 --m 4096 --k 4096")
    assert said.startswith("not measured, only estimated: products of unaligned rows: none")
    assert "n = 4098 pads" not in said  # 3 %, of rows that lose more by their alignment
    assert "rows are aligned to 4 bytes, not 16" in said
    aligned = "--dim n=4096,4104 --m 4096 --k 4096"
    assert "not measured" not in run(f"predict --gpu h100 {aligned}")
    # DeepBench's products, on a V100, include unaligned ones.
    assert "not measured" not in run("predict --gpu v100-sxm2-16gb --dim n=4098 --m 512 --k 4096")


def test_a_size_that_crashes_in_8_bits_is_said_first() -> None:
    words = "predict --gpu h100 --model llama-3-8b --dim ffn=14336,14344 --dtype"
    (broken,) = run_json(f"{words} fp8")["broken"]
    assert "ffn / tp = 14344 is no multiple of 16: crashes" in broken
    assert run(f"{words} fp8").startswith(f"rule: {broken}\n")
    assert run_json(f"{words} bf16")["broken"] == []
