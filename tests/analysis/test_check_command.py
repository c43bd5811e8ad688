"""`quantbench check` as it is typed: runs of every kind, measured tables, experiments, exit
codes.
"""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import made_runs
import pytest
from commands import refused, run, run_json
from simulator import SimulatedGpu, SimulatedWorker, along, records_of, write_simulated

from quantbench.device import lookup
from quantbench.launch import Tile
from quantbench.store.record import Failed, Record, Skipped
from quantbench.workload import Gemm

GPU = SimulatedGpu(108, Tile(128, 256))
HELD = Gemm(m=4096, n=1, k=4096)
NEEDS_TABLES = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None or find_spec("yaml") is None,
    reason="needs the extra quantbench[tables]",
)


def staircase() -> list[Record]:
    return records_of(GPU, along("n", range(1024, 8193, 64), HELD), noise=0.01, seed=1)


def test_a_page_in_words(tmp_path: Path) -> None:
    text = run(f"check {write_simulated(tmp_path, GPU, staircase())}")
    assert "SIMULATED DATA: tests/simulator.py" in text
    assert "113 measured points, 1 curve with close neighbours" in text
    assert "n = 1536 to 1600" in text
    assert "128x256 tile on 108 SMs: 2 to 3 waves" in text
    assert "NOT TESTED" not in text
    assert re.search(r"\d+ rules not tested: hidden-128, hidden-sm-count, ", text)
    assert "; `quantbench check --experiment NAME` measures one" in text
    assert text.rstrip().endswith("simulated-108sm/simulated-run")


def test_a_run_that_was_killed_is_said_to_lack_points(tmp_path: Path) -> None:
    made = made_runs.run(
        [replace(one, origin="measured") for one in staircase()], origin="measured"
    )
    for how in ("running", "complete"):
        folder = made_runs.write(
            tmp_path / how, replace(made, info=replace(made.info, how_ended=how))
        )
        said = (
            f"this run did not end as planned ({how}); the rest: quantbench sweep --resume {folder}"
        )
        assert (said in run(f"check {folder}").replace("\n", "")) == (how == "running")
        assert run_json(f"check {folder}")["how_ended"] == how


def test_a_page_for_programs(tmp_path: Path) -> None:
    data = run_json(f"check {write_simulated(tmp_path, GPU, staircase())}")
    assert data["origin"] == "simulated"
    first = data["cliffs"][0]
    assert (first["axis"], first["at"], first["next"]) == ("n", 1536, 1600)
    assert 1.0 < first["low"] < first["ratio"] < first["high"]
    assert (first["cause"]["kind"], first["cause"]["evidence"]) == ("wave edge", "arithmetic")
    assert len(first["keys"]) == 2
    (period,) = data["periods"]
    assert period["chosen"] == {"block_m": 128, "block_n": 256, "resident_blocks": 108}
    assert period["recovered"]["verdict"] == "CONFIRMED"
    assert period["recovered"]["confidence"] > 0.95
    assert period["chosen"] in period["recovered"]["best"]
    rules = {rule["rule"]: rule for rule in data["rules"]}
    assert rules["whole-waves"]["verdict"] == "CONFIRMED"
    assert rules["whole-waves"]["evidence"]
    assert (rules["k-8"]["verdict"], rules["k-8"]["effect"]) == ("NOT TESTED", None)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (Tile(128, 256, stages=3), "mine:G: 128x256 tile on 108 SMs explains the steps"),
        (Tile(128, 64), "mine:G: declared 128x64; the steps fit 128x256 tile on 108 SMs (over"),
    ],
)
def test_a_declared_tile_is_used_and_is_said_not_to_fit(
    tmp_path: Path, declared: Tile, said: str
) -> None:
    records = [replace(record, provider="mine:G") for record in staircase()]
    options = {"tiles": {"mine:G": asdict(declared)}}
    made = made_runs.run(records, device=GPU.spec(), options=options)
    folder = made_runs.write(tmp_path, made)
    assert said in " ".join(run(f"check {folder}").split())
    causes = [cliff["cause"]["words"] for cliff in run_json(f"check {folder}")["cliffs"]]
    assert all(f"{declared} tile on 108 SMs" in cause for cause in causes)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_runs_of_few_points(tmp_path: Path, kept: int) -> None:
    folder = write_simulated(tmp_path, GPU, staircase()[:kept])
    data = run_json(f"check {folder}", code=0 if kept else 2)
    assert (data["num_points"], data["num_curves"]) == (kept, kept // 2)
    assert (data["cliffs"], data["periods"]) == ([], [])
    assert {rule["verdict"] for rule in data["rules"]} == {"NOT TESTED"}


def test_a_run_full_of_failures(tmp_path: Path) -> None:
    records = staircase()[:40]
    for number, record in enumerate(records):
        failed = Failed("out_of_memory", "CUDA out of memory")
        records[number] = replace(record, outcome=Skipped("not here") if number % 2 else failed)
    folder = write_simulated(tmp_path, GPU, records)
    text = run(f"check {folder}", code=2)
    assert "0 measured points, 40 skipped or failed" in text


@pytest.mark.parametrize("kept", [0, 1])
def test_a_gate_that_judged_nothing_fails(tmp_path: Path, kept: int) -> None:
    folder = write_simulated(tmp_path, GPU, staircase()[:kept])
    assert refused(f"check {folder} --fail-above 1.2").operation == "check --fail-above"


def test_a_gate_fails_if_a_provider_failed_everywhere(tmp_path: Path) -> None:
    failed = [
        replace(record, outcome=Failed("wrong_result", "off by 2"), provider="mine:Gemm")
        for record in staircase()[:20]
    ]
    folder = write_simulated(tmp_path, GPU, staircase() + failed)
    run(f"check {folder}")
    assert "every point of mine:Gemm failed" in refused(f"check {folder} --fail-above 5").value


def test_the_exit_code_is_1_only_when_asked(tmp_path: Path) -> None:
    provider = "my_package.my_kernels:PersistentGemm"
    records = [replace(record, provider=provider) for record in staircase()]
    folder = write_simulated(tmp_path, GPU, records)
    said = " ".join(run(f"check {folder} --fail-above 1.2", code=1).split())
    head, _, named = said.partition(", first ")
    assert head.endswith("--fail-above 1.2: 3 cliffs surely higher")
    item = rf"gemm {provider} n = \d+ to \d+: at least 1\.\d\d"
    assert re.fullmatch(f"{item}; {item}; {item}", named)
    assert "surely" not in run(f"check {folder} --fail-above 5")


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("check", "no run"),
        ("check run --experiment k-8", "a run and --experiment"),
        ("check run --fail-above 0.9", "0.9"),
    ],
)
def test_wrong_use(words: str, value: str) -> None:
    assert refused(words).value == value


def test_an_experiment_measures_what_its_rule_needs_and_judges_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = SimulatedWorker(replace(GPU, misaligned=1.4), noise=0.01, seed=3)
    # Imported first, because otherwise it would keep the worker of this test for other tests.
    import_module("quantbench.cli.sweep_run")
    monkeypatch.setattr("quantbench.sweep.child.WorkerProcess", lambda: worker)
    data = run_json(f"check --experiment k-8 --results {tmp_path} --budget none")
    (rule,) = data["rules"]
    assert (rule["rule"], rule["verdict"]) == ("k-8", "CONFIRMED")
    assert rule["effect"] == pytest.approx(1.4, rel=0.02)
    assert {(gemm.m, gemm.n) for gemm in worker.asked} == {(4096, 4096)}
    assert {abs(gemm.k - round(gemm.k / 1024) * 1024) for gemm in worker.asked} == {0, 1, 2, 4}
    assert Path(data["run"]).is_relative_to(tmp_path)


def imported(results: Path, system: str) -> Path:
    what = f"--system {system} --table gemm --results {results}"
    return Path(run_json(f"import aiconfigurator {what}")[0]["folder"])


@pytest.mark.slow
@NEEDS_TABLES
def test_the_wave_cliffs_of_the_a100_table(tmp_path: Path) -> None:
    data = run_json(f"check {imported(tmp_path, 'a100_sxm')}")
    (period,) = data["periods"]
    assert period["chosen"] == {"block_m": 128, "block_n": 256, "resident_blocks": 108}
    assert {"block_m": 128, "block_n": 128, "resident_blocks": 216} in period["recovered"]["best"]
    large = [
        cliff for cliff in data["cliffs"]
        if (cliff["axis"], cliff["at"]) == ("m", 256) and min(cliff["held"].values()) >= 1024
    ]  # fmt: skip
    assert len(large) > 100
    by_waves = [cliff for cliff in large if cliff["cause"]["kind"] == "wave edge"]
    assert len(by_waves) > 0.6 * len(large)
    assert all(cliff["cause"]["words"].startswith("128x256 tile on 108 SMs") for cliff in by_waves)
    # From n = 10240 on, 3 rows of tiles are more than 108; 16384 is 128 and 192 tiles, two waves
    # both.
    wide = [cliff for cliff in large if cliff["held"]["n"] >= 10240 and cliff["held"]["n"] != 16384]
    assert len(wide) > 50
    assert {cliff["cause"]["kind"] for cliff in wide} == {"wave edge"}
    assert {cliff["cause"]["evidence"] for cliff in large} == {"arithmetic"}
    (common,) = [common for common in data["common"] if common["at"] == 256]
    assert 1.15 < common["low"] < common["ratio"] < common["high"] < 1.35
    assert common["causes"]["wave edge"] > common["causes"]["tile edge"]
    assert common["stepping"][0] > 1.4 > 1.2 > common["level"][0]
    verdicts = {rule["rule"]: rule["verdict"] for rule in data["rules"]}
    assert verdicts["whole-waves"] == "CONFIRMED"


@pytest.mark.slow
@NEEDS_TABLES
def test_no_single_tile_explains_the_steps_of_hopper(tmp_path: Path) -> None:
    folder = imported(tmp_path, "h100_sxm")
    periods = run_json(f"check {folder}")["periods"]
    (period,) = (one for one in periods if one["variant"] == "gemm bf16 nt")
    assert (period["recovered"]["reason"], period["chosen"]) == ("no single tile", None)
    assert period["recovered"]["explained"] < 0.3


def test_shapes_that_break_a_rule_of_their_library_are_counted(tmp_path: Path) -> None:
    works = [Gemm(64, 4096, k, dtype="fp8_block", layout="nt") for k in (4096, 4160, 4224, 4288)]
    folder = made_runs.write(
        tmp_path,
        made_runs.run(
            [made_runs.record(w, (10.0,) * 8, {"k": w.k}, provider="vllm.deepgemm") for w in works],
            device=lookup("h100-sxm5-80gb"),
        ),
    )
    assert "2 shapes with k of fp8_block off the multiples of 128: falls back in vLLM" in run(
        f"check {folder}"
    )
    (found,) = run_json(f"check {folder}")["broken_rules"]
    assert (found["shapes"], found["rule"]["multiple"]) == (2, 128)
