"""`quantbench plan` as it is typed: its screen, its JSON, its exit codes, what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import refused, run, run_json
from planner_doubles import EVERYWHERE, EvenTimes

from quantbench.cli.plan_setup import Setup

TABLE = Path(__file__).parents[1] / "data" / "published_layouts.csv"
BLOOM = "plan --model bloom-176b --gpus 384 --cluster jean-zay-a100 --gbs 2048"
LLAMA = "plan --model llama-3-8b --gpu h100-sxm5-80gb --gpus 32 --gbs 64 --tp 2,4"

SCREEN = """\
model: 176 B parameters: 70 layers of 14336, 112 heads of 128 (112 of keys and values), MLP of 57344, seq 2048, voc
assumed: unfused attention (of bloom-176b), Megatron's fused softmax, dropout (of bloom-176b), seq = 2048 (as bloom
83 layouts keep every rule, 38 of them fit
DP  TP  PP  CP  EP  MBS  intlv  ZeRO  recomp  SP             sec/it    more  model TFLOP/s   MFU  GiB  bubble  look
32   2   6   1   1    1      1     1    full      81.54 (74.7–95.2)  +0.0 %            145  46 %   70   6.9 %  reco
16   2  12   1   1    1      1     1    full      81.58 (74.7–95.4)  +0.0 %            145  46 %   42   7.6 %  reco
 8   4  12   1   1    1      1     1    full      82.34 (75.7–95.6)  +1.0 %            144  46 %   27   4.0 %  reco
 8   2  24   1   1    1      1     1    full      82.58 (75.7–96.4)  +1.3 %            143  46 %   28   8.0 %  reco
16   4   6   1   1    1      1     1    full      82.60 (76.0–95.8)  +1.3 %            143  46 %   40   3.6 %  reco
the best of other degrees: TP4 PP24 +2.0 %, TP1 PP12 +5.2 %, TP1 PP24 +6.9 %, TP8 PP12 +8.0 %, TP8 PP6 +8.3 %, TP8
1 more layouts fit with the degrees of the first, in other micro-batches, chunks, ZeRO, …: --json
10^12 tokens: 225 days, 2,070,000 GPU-hours, MFU 46 %
a lower bound on time (MFU: an upper bound), not counted: data loading, checkpoints, evaluation, restarts

Next: quantbench plan --check --model bloom-176b --gpus 384 --cluster jean-zay-a100 --gbs 2048 --dp 32 --tp 2 --pp
"""


def screen_of_a_search() -> str:
    """Returns the lines of a search, without the time that it took and the choice of a library; cut
    at 120 columns.
    """
    said = run(f"{BLOOM} --recompute full --no-sequence-parallel --pp 4,6,12,24 --zero 1")
    said = re.sub(r", library = .*|; \d+\.\d\d s$", "", said, flags=re.MULTILINE)
    return "".join(f"{line[:115].rstrip()}\n" for line in said.splitlines())


def test_the_screen_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setup, "times_of", staticmethod(lambda device: EvenTimes()))
    monkeypatch.setattr(Setup, "calibrations", EVERYWHERE)
    assert screen_of_a_search() == SCREEN


def test_the_next_command_checks_the_first_layout() -> None:
    following = run(f"{LLAMA} --library vllm --pp 1").partition("Next: quantbench plan ")[2]
    assert " --library vllm " in following
    assert "keeps every rule" in run(f"plan {following}")


def test_what_is_behind_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    shown = (
        "constants: ", "NCCL_ALGO=Ring", "GiB on the fullest GPU", "other software: nemo ",
        "use as much DP as you can", "by what takes the time",
    )  # fmt: skip
    plain, explained = run(f"{LLAMA}"), run(f"{LLAMA} --explain")
    assert [words for words in shown if words in plain] == []
    assert [words for words in shown if words not in explained] == []
    assert len(plain.splitlines()) < 20


def test_layouts_on_the_screen_differ_in_their_degrees() -> None:
    said = run("plan --model llama-3.1-405b --gpus 1024 --gpu h100 --gbs 512 --zero 1")
    rows = [line.split() for line in said.splitlines() if re.match(r" *\d+ +\d+ +\d+ ", line)]
    assert 2 <= len(rows) <= 5
    assert len({tuple(row[1:5]) for row in rows}) == len(rows)
    assert rows[0][1:4] == ["8", "8", "2"]  # TP 8, PP 8 and CP 2, as Megatron-Bridge publishes
    assert "the best of other degrees: TP" in said


@pytest.mark.parametrize(("more", "generic"), [("", True), ("--link-gb-per-s 20", False)])
def test_generic_links_are_named(more: str, generic: bool) -> None:
    said = run(f"plan --model llama-3-8b --gpus 16 --gpu l40s-48gb --gbs 128 --pp 2 {more}")
    assert ("its links are generic; --link-gb-per-s" in said) == generic


def test_a_search_as_json() -> None:
    data = run_json(f"{BLOOM} --tp 4,8 --zero 1 --recompute full --gpus-per-node 4")
    times = [layout["sec_per_it"] for layout in data["layouts"]]
    assert times == sorted(times)
    assert {layout["layout"]["tp"] for layout in data["layouts"]} == {4}
    assert data["job"]["topology"]["nodes"] == 96
    assert "changed by options" in data["job"]["topology"]["source"]
    assert data["job"]["calibration"]["provenance"]["rows_fitted"]
    one = data["layouts"][0]
    assert sum(one["seconds"].values()) == pytest.approx(one["sec_per_it"])
    assert sum(one["memory_gib"].values()) == pytest.approx(one["mem_gb"])
    assert one["hardware_tflops"] > one["model_tflops"] == pytest.approx(one["mfu"] * 312)


def test_checking_one_layout() -> None:
    words = f"{BLOOM} --check --mbs 2"
    said = run(f"{words} --tp 4 --pp 12")
    assert "DP8 TP4 PP12 MBS2 ZeRO-1 recompute: keeps every rule" in said
    assert re.search(
        r"\d\d\.\d\d \(\d+\.\d to \d+\.\d\) s per iteration, \d+ model TFLOP/s per GPU \(\d+ with",
        said,
    )
    assert "does not fit" in run(f"{words} --tp 8 --pp 1 --gbs 2016", code=1)
    data = run_json(f"{words} --tp 4 --pp 13 --dp 8", code=1)
    assert data["prediction"] is None
    assert {v["name"] for v in data["violations"] if v["strict"]} == {"gpus", "stages"}


@pytest.mark.parametrize(
    ("sizes", "faster"),
    [("--model llama-3-8b", True), ("--hidden 1024 --heads 16 --layers 24 --vocab 50304", False)],
)
def test_plan_and_advise_agree_on_8_bits_and_plan_compares_one_software(
    sizes: str, faster: bool
) -> None:
    words = f"{sizes} --gpu h100-sxm5-80gb"
    recipe = "--fp8-recipe tensorwise"
    narrow_us = run_json(f"advise {words} {recipe} --top 0")["latency_us"]
    assert (narrow_us < run_json(f"advise {words} --top 0")["latency_us"]) is faster
    words = f"plan {words} --gpus 8 --gbs 64 --check --tp 1 --pp 1 --zero 3"
    found = run_json(f"{words} {recipe}")
    wide_s = found["in_16_bits"]["sec_per_it"]
    assert (found["prediction"]["sec_per_it"] < wide_s) is faster
    bridge = run_json(f"{words} --stack megatron-bridge")
    assert bridge["prediction"]["sec_per_it"] == wide_s
    assert (bridge["in_16_bits"], bridge["broken"]) == (None, [])
    said = run(f"{words} {recipe}")
    assert "--stack megatron-bridge (factors of experts and of 8-bit" in said
    assert "; below 1: faster than the model of single products)" in said


def test_a_size_that_crashes_in_8_bits_is_said_first_as_advise_says_it() -> None:
    words = "--hidden 4100 --heads 20 --head-dim 205 --ffn 11008 --layers 8 --gpu h100-sxm5-80gb"
    words += " --fp8-recipe tensorwise"
    advised = {one["words"] for one in run_json(f"advise {words} --top 0")["broken_rules"]}
    words = f"plan {words} --vocab 50304 --gpus 8 --gbs 64 --tp 1"
    for mode in ("", "--check --pp 1"):
        broken = run_json(f"{words} {mode}")["broken"]
        assert set(broken) < advised
        assert run(f"{words} {mode}").startswith(f"rule: {broken[0]}; ")
        assert "is no multiple of 16: crashes" in broken[0]
    # Experts are whole on each GPU, so tp divides none of their sizes.
    whole = "plan --model gpt-oss-120b --gpu b200-sxm-180gb --gpus 64 --gbs 64 --fp8-recipe mxfp8"
    assert run_json(f"{whole} --check --tp 8 --pp 1 --ep 8")["broken"] == []


def test_rows_of_a_table() -> None:
    assert "hardware TFLOP/s" in run(f"plan --rows {TABLE}")
    data = run_json(f"plan --rows {TABLE}")
    assert len(data["rows"]) == 47
    assert {"row_id", "sec_per_it", "hardware_tflops", "mem_gb"} <= data["rows"][0].keys()


def test_rows_of_ones_own_with_options_for_what_they_lack(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(
        "gpu,gpus,tp,pp,mbs,gbs,nhidden,nlayers,sec_per_it\nA100-80GB,64,8,8,1,64,12288,96,18.0\n"
    )
    words = f"plan --rows {file} --recompute full --heads 96 --vocab 51200 --zero 0"
    row = run_json(f"{words}")["rows"][0]
    assert 5 < row["sec_per_it"] < 50
    assert {"name": "heads", "value": 96, "why": "option"} in row["assumed"]
    assert run_json(f"{words} --cluster jean-zay-a100")["rows"][0]["sec_per_it"] > row["sec_per_it"]
    assert "nan" not in run(f"{words}")


HEAD = "gpu,gpus,tp,pp,mbs,gbs,nhidden,nheads,kv_heads,ffn,gated,seq,vocab,nlayers,recompute,sec_per_it,stack"


def test_a_site_is_fitted_to_its_runs_and_used(tmp_path: Path) -> None:
    rows, site = tmp_path / "mine.csv", tmp_path / "site.json"
    cells = [
        f"H100,64,{2 ** (n % 4)},1,{1 + n % 2},256,{4096 + 2048 * (n % 2)},32,32,{4 * (4096 + 2048 * (n % 2))},no,2048,"
        f"51200,32,{('none', 'full')[n % 2]},"
        for n in range(12)
    ]

    def write(seconds: list[float], factor: float) -> None:
        lines = [f"{c}{factor * s},nemo" for c, s in zip(cells, seconds, strict=True)]
        rows.write_text("\n".join([HEAD, *lines]))

    write([1.0] * 12, 1.0)
    predicted = [row["sec_per_it"] for row in run_json(f"plan --rows {rows}")["rows"]]
    write(predicted, 1.3)
    said = run(f"plan --fit {rows} -o {site}")
    assert "fitted to 12 of 12 rows" in said
    assert "far from every known site" not in said
    words = f"{LLAMA} --zero 1 --recompute none"
    plain, own = run_json(f"{words} --stack nemo"), run_json(f"{words} --site {site}")
    assert own["layouts"][0]["sec_per_it"] == pytest.approx(
        1.3 * plain["layouts"][0]["sec_per_it"], rel=0.1
    )
    assert own["job"]["calibration"]["provenance"]["rows_fitted"] == 12
    # Times that no hardware explains are fitted, and said to be strange.
    write(predicted, 0.5)
    assert "far from every known site" in run(f"plan --fit {rows} -o {site}")


def test_a_fit_names_the_columns_that_it_needs(tmp_path: Path) -> None:
    rows, site = tmp_path / "mine.csv", tmp_path / "site.json"
    rows.write_text(f"{HEAD}\nH100,64,2,1,1,256,4096,32,,,,2048,51200,32,,1.5,nemo\n")
    assert (
        refused(f"plan --fit {rows} -o {site}").value
        == "mine.csv lacks kv_heads, ffn, gated, recompute"
    )
    assert not site.exists()


def test_the_software_changes_times_and_is_told() -> None:
    default, eager = run_json(f"{LLAMA}"), run_json(f"{LLAMA} --stack eager")
    assert "--stack megatron" in default["job"]["assumed"]
    assert eager["layouts"][0]["sec_per_it"] > default["layouts"][0]["sec_per_it"]


def test_changing_a_preset() -> None:
    words = f"{BLOOM} --hidden 13824 --heads 96 --layers 76 --recompute full --tp 8 --mbs 1"
    shape = run_json(words)["job"]["shape"]
    assert (shape["hidden"], shape["heads"]) == (13824, 96)
    assert (shape["head_dim"], shape["ffn"]) == (144, 55296)


def test_stages_that_count_embeddings_can_be_interleaved() -> None:
    words = "plan --model llama-3.1-405b --gpu h100-sxm5-80gb --gpus 1024 --gbs 512 --check"
    layout = "--tp 8 --pp 16 --mbs 1 --recompute full"
    assert run_json(f"{words} {layout} --interleave 8")["prediction"]
    assert run_json(f"{words} {layout} --interleave 3", code=1)["prediction"] is None


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (
            "plan --gpus 8 --gbs 8 --gpu h100",
            "no --hidden and no --heads and no --layers and no --vocab",
        ),
        ("plan --model bloom-176b --gpus 8 --gbs 8", "no GPU"),
        ("plan --model bloom-176b --gbs 8 --gpu H100", "no --gpus"),
        ("plan --model bloom-176b --gpus 8 --gpu H100", "no --gbs"),
        (f"{BLOOM} --tp four", "'four'"),
        (f"{BLOOM} --recompute some", "recompute = 'some'"),
        (f"{BLOOM} --check --tp 4,8 --pp 12", "--tp 4,8"),
        ("plan --rows nowhere.csv", "nowhere.csv (No such file or directory)"),
        (f"{BLOOM} --output x.json", "--output x.json without --fit"),
        (f"{BLOOM} --heads 111", "hidden = 14336 with heads = 111"),
        (f"{BLOOM} --stack jax", "--stack = 'jax'"),
        (f"{LLAMA} --dtype fp8", "dtype = fp8"),
        (f"plan --rows {TABLE} --tp 4,8", "--tp 4,8"),
        (f"plan --rows {TABLE} --explain", "--explain with --rows"),
    ],
)
def test_wrong_use_names_the_value(words: str, value: str) -> None:
    assert refused(words).value == value


def test_a_recipe_that_the_gpu_cannot_run_is_refused_with_those_that_it_can() -> None:
    assert refused(f"{LLAMA} --fp8-recipe nvfp4").expected.endswith("tensorwise_bf16_wgrad, block")
    assert (
        "a GPU with 8-bit"
        in refused("advise --model gpt-j-6b --gpu a100-sxm4-80gb --fp8-recipe block").expected
    )


def test_a_search_tries_no_micro_batch_that_is_too_large_to_predict() -> None:
    words = "plan --model mixtral-8x7b --gpu gb200-186gb --gpus 64 --gbs 1024 --tp 8 --cp 1"
    found = [one["layout"]["mbs"] for one in run_json(f"{words} --ep 8 --zero 1")["layouts"]]
    assert max(found) == 32  # 64 × 32768 rows are one more than are predicted
    assert "no time is predicted of larger products" in refused(f"{words} --mbs 64 --ep 8").expected


def test_a_search_in_which_nothing_fits() -> None:
    said = run("plan --model llama-3-70b --gpus 1 --gpu l4-24gb --gbs 8", code=1)
    assert "0 of them fit" in said
