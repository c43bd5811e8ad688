"""`quantbench advise` as it is typed: what it prints, its JSON, its gate, how it refuses, what it
leaves unloaded.
"""

from __future__ import annotations

import doctest
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from commands import refused, run, run_json
from known_profile import GEMMS, known_profile

from quantbench.device import lookup
from quantbench.errors import StoreError
from quantbench.store.typed import encode
from quantbench.sweep.options import SweepOptions, plan_sweep
from quantbench.sweep.shape_file import read_shape_file
from quantbench.workload import Gemm, TransformerShape

DOCS = Path(__file__).parents[2] / "docs" / "advising.md"
COMMANDS = re.findall(r"^quantbench advise (.*)$", DOCS.read_text(encoding="utf-8"), re.M)
LIBRARY = "library = sglang (the default: the largest table of 3)"
A100 = "advise --gpu a100-sxm4-80gb"
SIZES = "--hidden 14400 --heads 96 --tp 8 --attention unfused"
WIDE = f"{A100} {SIZES}"


def test_it_says_device_times_shape_costs_neighbours_and_what_is_next() -> None:
    said = run(f"{WIDE} --top 8")
    lines = said.splitlines()
    # What rests on no measurement comes before anything else.
    assert lines[0].startswith("not measured, only estimated: ")
    assert "batched products of unaligned rows: at a rate fitted to whole iterations" in lines[0]
    assert "softmax: none measured on a100-sxm4-80gb (" in lines[0]
    assert "90 layers of 14400, 96 heads of 150, ffn 57600" in lines[3]
    assert "layers = 90 (hidden / 160), vocab = 51200, seq = 2048" in lines[4]
    assert any(line.startswith(("scores ", "context ")) for line in lines)
    assert "  scores: alignment: head_dim = 150 is no multiple of 8" in said
    assert "GPU-hours per trillion tokens" in said
    assert "wasted past edges: " in said
    assert re.search(
        r"^Worth a change: of \d+ shapes tried, head_dim 150 → 152.* is surely faster, by \+\d+ % ",
        said,
        re.M,
    )
    assert "hidden 14400 → 14336" in said
    assert re.search(r"head_dim 150 → \d+: 16-byte aligned", said)
    assert lines[-1].startswith("Next: repeat this with -o shapes.json")
    assert "\x1b[" not in said


def test_everything_as_json() -> None:
    data = run_json(f"{WIDE} --layers 80 --vocab 250880 --mbs 2 --seq 1024 --top 3")
    assert data["device"] == "a100-sxm4-80gb"
    assert "Megatron's fused softmax" in data["assumed"]
    shape = data["shape"]
    assert (shape["layers"], shape["vocab"], shape["mbs"], shape["seq"]) == (80, 250880, 2, 1024)
    assert data["ops"][0]["edges"][0]["kind"] == "alignment"
    assert sum(op["share"] for op in data["ops"]) == pytest.approx(1)
    assert sum(op["waste_us"] for op in data["ops"]) == pytest.approx(data["waste_us"])
    assert data["waste_share"] == pytest.approx(data["waste_us"] / data["latency_us"])
    hours = data["waste_us"] / 3.6e9 * 8 / (2 * 1024) * 1e12
    assert data["waste_gpu_hours_per_trillion_tokens"] == pytest.approx(hours)
    assert data["unmeasured"][0]["share"] > 0.1
    assert data["keep"] is False
    assert len(data["neighbours"]) == 3
    for neighbour in data["neighbours"]:
        assert abs(neighbour["parameters_change"]) <= 0.05
        assert neighbour["low"] < neighbour["gain"] < neighbour["high"]
        assert neighbour["sure"] == (neighbour["low"] > 0)
        assert neighbour["reasons"]


def test_reasons_follow_narrow_tables() -> None:
    lines = run(f"{WIDE}").splitlines()
    assert (
        "  scores: alignment: head_dim = 150 is no multiple of 8: rows aligned to 4 bytes, not 16"
        in lines
    )
    assert any(line.startswith("scores ") and len(line) <= 80 for line in lines)
    assert any(
        re.match(r"  hidden 14400 → 14336, .*: head_dim 150 → \d+: 16-byte aligned; ", line)
        for line in lines
    )


def test_presets_and_configs_can_be_changed(tmp_path: Path) -> None:
    data = run_json(f"{A100} --model llama-2-7b --attention flash --tp 2 --top 0")
    assert (data["shape"]["ffn"], data["shape"]["gated"], data["shape"]["tp"]) == (11008, True, 2)
    seq = "seq = 4096 (as llama-2-7b was pre-trained)"
    assert data["assumed"] == ["no dropout", seq, "dtype = bf16", "mbs = 1", LIBRARY]
    assert {op["op"] for op in data["ops"]} >= {"attention", "attention.backward", "mlp_gate"}
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4,
                "intermediate_size": 2816, "vocab_size": 32000, "num_hidden_layers": 8, "max_position_embeddings": 1024,
            }
        )
    )  # fmt: skip
    data = run_json(f"{A100} --config {config} --hidden 2048 --heads 32 --kv-heads 8 --top 0")
    expected = {
        "hidden": 2048,
        "head_dim": 64,
        "ffn": 5632,
        "kv_heads": 8,
        "layers": 8,
        "seq": 1024,
    }
    assert data["shape"].items() >= expected.items()


def test_a_profile_takes_the_place_of_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    known_profile().save(file)
    said = run(f"advise --profile {file} {SIZES} --top 1")
    assert said.splitlines()[0].startswith("not measured, only estimated: ")
    assert "products: beyond the rows of the profile" in said.splitlines()[0]
    assert said.splitlines()[2].startswith("times: profile of a100-sxm4-80gb: 12 gemm, 2 softmax")
    assert "alignment: head_dim = 150 is no multiple of 8" in said
    # A shape whose product is one of the profile's: its figure comes back.
    of_known = "--hidden 4096 --heads 32 --ffn 4096 --seq 2048 --layers 1 --top 0"
    data = run_json(f"advise --profile {file} {of_known}")
    down = next(op for op in data["ops"] if op["op"] == "mlp_down")
    assert (down["workload"]["m"], down["workload"]["n"], down["workload"]["k"]) == (
        2048,
        4096,
        4096,
    )
    assert down["latency_us"] == pytest.approx(GEMMS[2048, 4096, 4096])
    assert " measured" in data["op_times"]
    assert refused(f"{WIDE} --profile {file}").value == f"--gpu a100-sxm4-80gb and --profile {file}"
    assert isinstance(refused(f"advise --profile {tmp_path / 'none.json'} {SIZES}"), StoreError)


def test_the_profile_of_a_processor_is_refused(tmp_path: Path) -> None:
    made = known_profile({})
    core = replace(made.device, name="cpu-made-up", kind="cpu", compute_capability=None)
    replace(made, device=core, cliffs=()).save(tmp_path / "cpu.json")
    assert (
        refused(f"advise --profile {tmp_path / 'cpu.json'} {SIZES}").expected
        == "the profile of a GPU"
    )


def test_a_vocabulary_that_tp_does_not_divide_is_padded() -> None:
    said = run(f"{A100} --model gpt2-xl --tp 5 --top 0")
    assert "vocab padded from 50257 to 50560, as tp = 5 must divide it" in said


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        ("--model gpt2-xl --tp 2", "heads divisible by tp: 24 or 26"),
        ("--model gpt2-xl --tp 64", "heads divisible by tp: 64"),
        ("--hidden 4096 --heads 32 --ffn 1001 --tp 8", "ffn divisible by tp: 1000 or 1008"),
    ],
)
def test_what_tp_cannot_split_is_refused_with_the_nearest_sizes(words: str, nearest: str) -> None:
    assert refused(f"{A100} {words}").expected == nearest


def test_a_shape_that_none_surely_beats_is_kept() -> None:
    words = "advise --gpu h100-sxm5-80gb --model llama-3-8b --attention flash"
    said = run(f"{words}")
    assert said.startswith("not measured, only estimated: ")
    assert "(every gain is within the error of the times)" in said
    assert re.search(r"^Keep it: of \d+ shapes tried none is surely faster", said, re.M)
    assert "other shapes" not in said
    assert "all ops, each wasting less than 0.5 % (" in said
    assert not any(line.startswith("op ") for line in said.splitlines())
    asked = run(f"{words} --top 3")
    assert "other shapes" in asked
    assert "measure a shape whose interval holds 0 before you move" in asked
    assert run_json(f"{words}")["keep"] is True


def test_small_waste_shares_a_line() -> None:
    said = run(f"{A100} --model gpt2-xl --attention flash")
    rows = [line.split()[0] for line in said.splitlines() if re.match(r"\S+ .*\d–\d.*\d–\d", line)]
    assert "logits" in rows
    assert "qkv" not in rows
    assert re.search(
        r"^the others, each wasting less than 0.5 % \(.* together\): .*qkv \d+ µs", said, re.M
    )


def test_constraints_are_shown_and_kept() -> None:
    data = run_json(f"{WIDE} --keep hidden,ffn,layers")
    assert data["space"]["keep"] == ["hidden", "ffn", "layers"]
    assert {(n["shape"]["hidden"], n["shape"]["layers"]) for n in data["neighbours"]} <= {
        (14400, 90)
    }
    said = run(f"{WIDE} --keep hidden,kv-heads --top 1")
    assert "or as they are; as many heads of 152; kept: hidden, kv_heads" in said


def test_misaligned_heads_are_not_kept() -> None:
    """Heads of 125 on four GPUs make qkv's rows 3750 wide, and no hidden of 5000 has aligned heads
    unless their product is another.
    """
    words = "advise --gpu a100 --hidden 5000 --heads 40 --tp 4 --keep"
    said = run(f"{words} hidden,heads")
    assert said.startswith("not measured, only estimated: ")
    assert "products of unaligned rows: none measured" in said.splitlines()[0]
    assert re.search(r"tried, head_dim 125 → 128.* is surely faster", said)
    said = run(f"{words} hidden,head_dim")
    assert "Keep it" not in said
    assert re.search(r"Do not keep it: misaligned rows waste 1\d % \(qkv width / tp = 3750", said)
    assert not run_json(f"{words} hidden,head_dim")["keep"]
    # A larger micro-batch makes the waste smaller, and aligns no row.
    said = run("advise --gpu h100 --layers 32 --tp 4 --hidden 5120 --heads 32 --head-dim 100")
    assert "no shape tried aligns them; multiples of 8 are aligned" in said


def test_the_file_it_writes_is_planned_as_it_was_compared(tmp_path: Path) -> None:
    """Every op of every shape that advise compared, forward and backward, and nothing else."""
    file = tmp_path / "shapes.json"
    qwen = "advise --gpu h100-sxm5-80gb --model qwen2.5-14b --tp 2 --attention flash"
    data = run_json(f"{qwen} -o {file}")
    shapes = [data["shape"], *(n["shape"] for n in (*data["neighbours"], *data["one_change"]))]
    compared = {op.workload for shape in shapes for op in TransformerShape(**shape).ops()}
    options = SweepOptions((), models=read_shape_file(file), providers=("torch.mm", "torch.flash"))
    _, plan = plan_sweep(options, lookup("h100-sxm5-80gb"))
    assert {point.workload for point in plan.points} == compared
    assert not plan.left_out
    asked = {op["op"]: op["workload"] for op in data["ops"]}
    first = {
        p.op: point.workload
        for point in plan.points
        for p in point.places
        if p.axes == {"shape": 1}
    }
    assert encode(first) == asked
    qkv = first["qkv"]
    assert isinstance(qkv, Gemm)
    assert qkv.n == (40 + 2 * 8) * 128 // 2  # 3584 on each of two GPUs: 7168 in all
    assert f"shapes: {file}" in run(f"{qwen} -o {file}")
    last = run(f"{qwen} -o {file}").splitlines()[-1]
    assert re.fullmatch(
        rf"Next, on such a card \(measures every op of .*\): quantbench sweep --shapes {file}", last
    )
    assert refused(f"{qwen} -o {tmp_path / 'x.csv'}").operation == "--shapes-out"
    run(f"{qwen} -o {tmp_path / 'new' / 's.json'}")
    assert (tmp_path / "new" / "s.json").read_text() == file.read_text()


def test_the_gate() -> None:
    said = run(f"{WIDE} --top 0 --fail-over 3%", code=1)
    assert "FAIL: " in said
    assert "wasted past edges, 3.0 % allowed" in said
    assert "ok: " in run(f"{WIDE} --top 0 --fail-over '90 %'")
    assert run_json(f"{WIDE} --top 0 --fail-over 3%", code=1)["failed"] is True


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (f"{WIDE} --keep depth", "--keep = 'depth'"),
        (f"{A100} --hidden 14400 --heads 97", "hidden = 14400 with heads = 97"),
        (f"{A100} --hidden 1024 --heads 16 --kv-heads 3", "kv_heads = 3"),
        (A100, "no --hidden and no --heads"),
        (f"{A100} --hidden 1024", "no --heads"),
        ("advise --hidden 1024 --heads 16", "no GPU"),
        (f"{A100} --model llama-9", "'llama-9'"),
        (f"{A100} --model gpt2-xl --config x", "--model gpt2-xl and --config x"),
        (f"{A100} --model llama-3-8b --ep 4", "--ep 4 without experts"),
        (f"{A100} --model mixtral-8x7b --ep 3", "experts = 8 with ep = 3"),
        (f"{WIDE} --fail-over 3", "'3'"),
        (f"{WIDE} --attention paged", "--attention = 'paged'"),
        (f"{WIDE} --dtype bf61", "--dtype bf61 on a100-sxm4-80gb"),
        (f"{WIDE} --seq 4000000", "m = 4000000"),
    ],
)
def test_what_cannot_be_is_refused(words: str, value: str) -> None:
    assert refused(words).value == value


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_of_the_page_run(line: str, tmp_path: Path) -> None:
    words = line.replace("/tmp/", f"{tmp_path}/")
    assert run(f"advise {words} --top 1")


def test_the_python_of_the_page_says_what_it_says() -> None:
    assert len(COMMANDS) >= 5
    found = doctest.testfile(str(DOCS), module_relative=False)
    assert found.attempted >= 7
    assert found.failed == 0
