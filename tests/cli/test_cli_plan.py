"""`quantbench plan` as it is typed: what it prints, its JSON, its exit codes, how it refuses."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from quantbench.cli import plan_run
from quantbench.cli.plan import PlanOptions, plan
from quantbench.errors import InputError

TABLE = Path(__file__).parents[1] / "data" / "published_layouts.csv"
BLOOM = ("--model", "bloom-176b", "--gpus", "384", "--cluster", "jean-zay-a100", "--gbs", "2048")

app = typer.Typer()
app.command()(plan)


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def run_json(*words: str, code: int = 0) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(run(*words, "--json", code=code))
    assert (data["format"], data["version"]) == ("quantbench-plan", 1)
    return data


def test_a_search_says_model_machines_constants_layouts_and_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    said = run(*BLOOM, "--recompute", "full", "--no-sequence-parallel", "--top", "5")
    assert "model: 176 B parameters: 70 layers of 14336, 112 heads of 128" in said
    assert "machines: 384 × a100-sxm4-80gb, 8 per node, 2" in said
    assert " GB/s inside a node, 50 GB/s between nodes (jean-zay-a100)" in said
    assert "(fitted there)" in said
    assert "made with: quantbench " in said
    assert "NCCL_ALGO=Ring" in said
    assert "layouts keep every rule" in said
    assert "look at first" in said
    assert "use as much DP as you can" in said
    assert "github.com/bigscience-workshop" in said
    following = said.partition("Next: quantbench ")[2].strip()
    assert following.startswith("plan --check --model bloom-176b")
    checked = run(*shlex.split(following)[1:])
    assert "keeps every rule" in checked
    assert re.search(r"\d\d\.\d\d \(\d+\.\d to \d+\.\d\) s per iteration, \d+ TFLOPs per GPU, \d\d,\d{3} ", checked)


def test_the_next_command_has_every_option_but_those_of_a_layout_and_of_other_modes() -> None:
    of_layout = {"dp", "tp", "pp", "mbs", "interleave", "zero", "recompute", "cp", "ep", "sequence_parallel"}
    assert {*plan_run._SAID_AGAIN} == {field.name for field in fields(PlanOptions)} - of_layout - {"allow_uneven"}
    said = run(*LLAMA, "--library", "vllm", "--top", "1", "--tp", "8", "--pp", "1")
    assert " --library vllm " in said.partition("Next: ")[2]


def test_a_search_as_json() -> None:
    data = run_json(*BLOOM, "--tp", "4,8", "--zero", "1", "--recompute", "full")
    times = [layout["sec_per_it"] for layout in data["layouts"]]
    assert times == sorted(times)
    assert {layout["layout"]["tp"] for layout in data["layouts"]} == {4, 8}
    assert data["job"]["topology"]["nodes"] == 48
    assert data["job"]["calibration"]["provenance"]["rows_fitted"]
    assert {rule["name"] for rule in data["rules_of_thumb"]} >= {"DP", "MBS 2", "head_dim"}


def test_machines_of_ones_own() -> None:
    data = run_json(
        "--model", "llama-3-8b", "--gpu", "h100-sxm5-80gb", "--gpus", "16", "--gbs", "64", "--attention", "flash",
        "--gpus-per-node", "4", "--node-gbit-per-s", "800", "--seq", "4096", "--recompute", "selective,none",
    )  # fmt: skip
    topology = data["job"]["topology"]
    assert (topology["gpus_per_node"], topology["nodes"], topology["node_gb_per_s"]) == (4, 4, 100.0)
    assert "changed by options" in topology["source"]
    assert data["job"]["shape"]["attention"] == "flash"
    assert all(layout["layout"]["tp"] <= 4 for layout in data["layouts"])


def test_checking_a_good_layout() -> None:
    said = run(*BLOOM, "--check", "--tp", "4", "--pp", "12", "--mbs", "2")
    assert "DP8 TP4 PP12 MBS2 ZeRO-1 recompute: keeps every rule" in said
    assert "of 79.2 GiB: fits" in said
    assert "s per iteration" in said


def test_checking_an_impossible_layout_ends_with_1() -> None:
    said = run(*BLOOM, "--check", "--tp", "4", "--pp", "13", "--mbs", "2", "--dp", "8", code=1)
    assert "impossible gpus: dp 8 · tp 4 · pp 13 = 416 GPUs, and there are 384" in said
    assert "impossible stages: 70 layers over 13 stages leave 5 over; take layers = 65 or 78" in said
    data = run_json(*BLOOM, "--check", "--tp", "4", "--pp", "13", "--mbs", "2", "--dp", "8", code=1)
    assert data["prediction"] is None
    assert {v["name"] for v in data["violations"] if v["strict"]} == {"gpus", "stages"}


def test_checking_a_layout_that_does_not_fit_ends_with_1() -> None:
    said = run(*BLOOM, "--check", "--tp", "8", "--pp", "1", "--mbs", "1", "--dp", "48", "--gbs", "2016", code=1)
    assert "does not fit" in said


@pytest.mark.slow
def test_rows_of_a_table() -> None:
    said = run("--rows", str(TABLE))
    assert "rank correlation" in said
    assert "Missed by more than 8 %, and what is known:" in said
    data = run_json("--rows", str(TABLE))
    assert len(data["rows"]) == 47
    assert {"row_id", "sec_per_it", "tflops", "mem_gb"} <= data["rows"][0].keys()
    assert data["calibrations"]["sites"].keys() == {"jean-zay-a100", "jean-zay-v100"}


def test_rows_of_ones_own_with_options_for_what_they_lack(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("gpu,gpus,tp,pp,mbs,gbs,nhidden,nlayers,sec_per_it\nA100-80GB,64,8,8,1,64,12288,96,18.0\n")
    words = ("--rows", str(file), "--recompute", "full", "--heads", "96", "--vocab", "51200", "--zero", "0")
    row = run_json(*words)["rows"][0]
    assert row["row_id"] == "1"
    assert 5 < row["sec_per_it"] < 50
    assert {"name": "heads", "value": 96, "why": "option"} in row["assumed"]
    slower = run_json(*words, "--cluster", "jean-zay-a100")["rows"][0]
    assert slower["sec_per_it"] > row["sec_per_it"]


def test_mistakes_of_a_table_end_with_1(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    head = "gpu,gpus,tp,pp,mbs,gbs,nhidden,nheads,nlayers,vocab"
    good = "A100-80GB,384,4,12,2,2048,14336,112,72,250880"
    bad = "A100-80GB,384,4,48,2,2048,14336,112,72,250880"
    table.write_text(f"{head}\n{good}\n{bad}\n")
    said = run("--rows", str(table), "--check", code=1)
    assert "row 2: impossible: stages: 72 layers over 48 stages" in said
    assert "1 rows of table.csv have something wrong" in said
    assert len(run_json("--rows", str(table), "--check", code=1)["findings"]) == 1
    table.write_text(f"{head}\n{good}\n")
    assert "nothing is wrong in table.csv" in run("--rows", str(table), "--check")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("--gpus", "8", "--gbs", "8", "--gpu", "h100-sxm5-80gb"),
            "plan: no --hidden and no --heads and no --layers and no --vocab; expected --model, --config, or",
        ),
        (("--model", "bloom-176b", "--gpus", "8", "--gbs", "8"), "plan: no GPU; expected --gpu"),
        (
            ("--model", "bloom-176b", "--gbs", "8", "--gpu", "H100"),
            "plan: no --gpus; expected --gpus, how many there are",
        ),
        (
            ("--model", "bloom-176b", "--gpus", "8", "--gpu", "H100"),
            "plan: no --gbs; expected --gbs, the global batch size in sequences, such as 2048",
        ),
        ((*BLOOM, "--tp", "four"), "--tp: 'four'; expected integers from 1 to 2,147,483,647, comma"),
        (
            (*BLOOM, "--recompute", "some"),
            "plan: recompute = 'some'; expected one of full, selective, none",
        ),
        ((*BLOOM, "--attention", "slow"), "plan: --attention = 'slow'; expected one of flash, unfused"),
        ((*BLOOM, "--check", "--tp", "4,8", "--pp", "12"), "plan --check: --tp 4,8; expected one value"),
        (("--rows", "nowhere.csv"), "plan: nowhere.csv (No such file or directory)"),
        ((*BLOOM, "--output", "x.json"), "plan: --output x.json without --fit"),
        ((*BLOOM, "--tp", "112"), "plan: --tp 112 on "),
        (("--rows", str(TABLE), "--tp", "4,8"), "plan --rows: --tp 4,8; expected one value for rows without it"),
    ],
)
def test_wrong_use_is_one_line(words: tuple[str, ...], text: str) -> None:
    from quantbench.errors import QuantbenchError

    with pytest.raises(QuantbenchError) as caught:
        run(*words)
    assert str(caught.value).startswith(text)


def test_a_search_tries_no_micro_batch_that_is_too_large_to_predict() -> None:
    words = ("--model", "mixtral-8x7b", "--gpu", "gb200-186gb", "--gpus", "64", "--gbs", "1024", "--tp", "8")
    found = [one["layout"]["mbs"] for one in run_json(*words)["layouts"]]
    assert max(found) == 32  # 64 × 32768 rows are one more than are predicted
    with pytest.raises(InputError, match="no time is predicted of larger products"):
        run(*words, "--mbs", "64")


def test_a_search_in_which_nothing_fits_names_no_times() -> None:
    said = run("--model", "llama-3-70b", "--gpus", "1", "--gpu", "l4-24gb", "--gbs", "8", code=1)
    assert "0 of them fit" in said
    assert "times: \n" not in said


def test_changing_a_preset() -> None:
    data = run_json(*BLOOM[2:], "--model", "bloom-176b", "--hidden", "13824", "--heads", "96", "--layers", "76",
                    "--recompute", "full", "--tp", "8", "--mbs", "1")  # fmt: skip
    shape = data["job"]["shape"]
    assert (shape["hidden"], shape["heads"], shape["head_dim"], shape["ffn"]) == (13824, 96, 144, 55296)
    with pytest.raises(InputError, match="hidden divisible by heads"):
        run(*BLOOM, "--heads", "111")


LLAMA = ("--model", "llama-3-8b", "--gpu", "h100-sxm5-80gb", "--gpus", "32", "--gbs", "64", "--tp", "2,4")


def test_the_software_changes_times_and_is_told() -> None:
    default, eager = run_json(*LLAMA), run_json(*LLAMA, "--stack", "eager")
    assert "--stack megatron" in default["job"]["assumed"]
    assert eager["job"]["stack"] == "eager"
    assert eager["layouts"][0]["sec_per_it"] > default["layouts"][0]["sec_per_it"]
    assert default["job"]["calibration"]["elementwise_factor"] > 1
    said = run(*LLAMA, "--memory", "--top", "3")
    assert "The same layout with other software: nemo " in said
    assert "GiB on the fullest GPU; nine in ten runs are within" in said
    with pytest.raises(InputError, match="--stack = 'jax'; expected one of megatron, nemo"):
        run(*LLAMA, "--stack", "jax")


def test_a_site_is_fitted_to_its_runs_and_used(tmp_path: Path) -> None:
    rows, site = tmp_path / "mine.csv", tmp_path / "site.json"
    head = "gpu,gpus,tp,pp,mbs,gbs,nhidden,nheads,nlayers,recompute,sec_per_it,stack"
    cells = [
        f"H100,64,{2 ** (n % 4)},1,{1 + n % 2},256,{4096 + 2048 * (n % 2)},32,32,{('none', 'full')[n % 2]},"
        for n in range(12)
    ]
    rows.write_text("\n".join([head, *(cell + "1,nemo" for cell in cells)]))
    predicted = [row["sec_per_it"] for row in run_json("--rows", str(rows))["rows"]]
    rows.write_text("\n".join([head, *(f"{c}{1.3 * s},nemo" for c, s in zip(cells, predicted, strict=True))]))
    said = run("--fit", str(rows), "-o", str(site))
    assert "fitted to 12 of 12 rows" in said
    assert re.search(r"mean error 23\.\d % with the stack's factors, [0-7]\.\d % with each row left out", said)
    assert "not determined by these rows" in said
    words = (*LLAMA, "--zero", "1", "--recompute", "none")
    plain, own = run_json(*words, "--stack", "nemo"), run_json(*words, "--site", str(site))
    assert own["layouts"][0]["sec_per_it"] == pytest.approx(1.3 * plain["layouts"][0]["sec_per_it"], rel=0.1)
    assert own["job"]["calibration"]["provenance"]["rows_fitted"] == 12


def test_context_parallel_layouts() -> None:
    data = run_json(*LLAMA, "--cp", "2,4", "--zero", "3")
    layouts = [layout["layout"] for layout in data["layouts"]]
    assert {layout["cp"] for layout in layouts} == {2, 4}
    assert all(layout["dp"] * layout["tp"] * layout["pp"] * layout["cp"] == 32 for layout in layouts)


def test_stages_that_count_embeddings_can_be_interleaved(tmp_path: Path) -> None:
    words = ("--model", "llama-3.1-405b", "--gpu", "h100-sxm5-80gb", "--gpus", "1024", "--gbs", "512", "--check")
    layout = ("--tp", "8", "--pp", "16", "--mbs", "1", "--recompute", "full")
    said = run(*words, *layout, "--interleave", "8", code=0)
    assert "keeps every rule" in said or "cost time" in said
    assert "take an interleave that divides 8" in run(*words, *layout, "--interleave", "3", code=1)
