"""`quantbench advise` as it is typed: what it prints, its JSON, its gate, how it refuses, what it leaves unloaded."""

from __future__ import annotations

import doctest
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from known_profile import GEMMS, known_profile
from typer.testing import CliRunner

from quantbench.cli.advise import advise
from quantbench.errors import InputError, StoreError

DOCS = Path(__file__).parent.parent / "docs" / "advising.md"
COMMANDS = re.findall(r"^quantbench advise (.*)$", DOCS.read_text(encoding="utf-8"), re.M)
A100 = ("--gpu", "a100-sxm4-80gb")
WIDE = (*A100, "--hidden", "14400", "--heads", "96", "--tp", "8")

app = typer.Typer()
app.command()(advise)


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def run_json(*words: str, code: int = 0) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(run(*words, "--json", code=code))
    assert (data["format"], data["version"]) == ("quantbench-advice", 1)
    return data


def test_it_says_device_times_shape_costs_neighbours_and_what_is_next() -> None:
    said = run(*WIDE)
    lines = said.splitlines()
    assert lines[0].startswith("a100-sxm4-80gb: 108 SMs (sm_80), 80 GiB at 2039 GB/s")
    assert lines[1].startswith("times: products on a100-sxm4-80gb: fitted on")
    assert "batched products of unaligned rows: at a rate fitted to whole iterations" in lines[1]
    assert "90 layers of 14400, 96 heads of 150, ffn 57600" in lines[2]
    assert "scores, softmax and context as Megatron runs them" in lines[2]
    assert lines[3] == "assumed: layers = 90 (hidden / 160), vocab = 51200, seq = 2048, mbs = 1"
    worst = next(i for i, line in enumerate(lines) if line.startswith("op ")) + 1
    assert lines[worst].startswith(("scores", "context"))
    assert "alignment: head_dim = 150 is no multiple of 8: rows aligned to 4 bytes, not 16" in lines[worst]
    assert "GPU-hours per trillion tokens" in said
    assert "wasted past edges: " in said
    assert "within ±5.0 % of the parameters were tried" in said
    assert "hidden 14400 → 13824" in said
    assert re.search(r"head_dim 150 → \d+: 16-byte aligned", said)
    assert "one change alone" in said
    assert re.search(r"Next: on such a card, quantbench sweep --dim hidden=13824,\S*14400\S* --tp 8", said)
    assert lines[-1].endswith("ask again with --attention flash")
    assert "\x1b[" not in said


def test_everything_as_json() -> None:
    data = run_json(*WIDE, "--layers", "80", "--vocab", "250880", "--mbs", "2", "--seq", "1024", "--top", "3")
    assert data["device"] == "a100-sxm4-80gb"
    assert data["assumed"] == []
    shape = data["shape"]
    assert [shape[name] for name in ("layers", "vocab", "mbs", "seq", "tp", "dtype")] == [
        80,
        250880,
        2,
        1024,
        8,
        "bf16",
    ]
    assert data["ops"][0]["edges"][0]["kind"] == "alignment"
    assert sum(op["share"] for op in data["ops"]) == pytest.approx(1)
    assert sum(op["waste_us"] for op in data["ops"]) == pytest.approx(data["waste_us"])
    assert data["waste_share"] == pytest.approx(data["waste_us"] / data["latency_us"])
    hours = data["waste_us"] / 3.6e9 * 8 / (2 * 1024) * 1e12
    assert data["waste_gpu_hours_per_trillion_tokens"] == pytest.approx(hours)
    assert len(data["neighbours"]) == 3
    for neighbour in data["neighbours"]:
        assert abs(neighbour["parameters_change"]) <= 0.05
        assert neighbour["gain_low"] < neighbour["gain"] < neighbour["gain_high"]
        assert neighbour["reasons"]


def test_a_narrow_terminal_loses_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantbench.cli.console._PIPE_WIDTH", 80)
    lines = run(*WIDE).splitlines()
    assert "  scores: alignment: head_dim = 150 is no multiple of 8: rows aligned to 4 bytes, not 16" in lines
    assert any(line.startswith("scores ") and len(line) <= 80 for line in lines)
    assert any(re.match(r"  hidden 14400 → 13824, .*: head_dim 150 → \d+: 16-byte aligned; ", line) for line in lines)


def test_presets_and_configs_can_be_changed(tmp_path: Path) -> None:
    data = run_json(*A100, "--model", "llama-2-7b", "--attention", "flash", "--tp", "2", "--top", "0")
    assert (data["shape"]["ffn"], data["shape"]["gated"], data["shape"]["tp"]) == (11008, True, 2)
    assert data["assumed"] == ["mbs = 1"]
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
    data = run_json(
        *A100, "--config", str(config), "--hidden", "2048", "--heads", "32", "--kv-heads", "8", "--top", "0"
    )
    assert (data["shape"]["hidden"], data["shape"]["head_dim"], data["shape"]["ffn"]) == (2048, 64, 5632)
    assert (data["shape"]["kv_heads"], data["shape"]["layers"], data["shape"]["seq"]) == (8, 8, 1024)


def test_a_profile_takes_the_place_of_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    known_profile().save(file)
    said = run("--profile", str(file), *WIDE[2:], "--top", "1")
    assert said.splitlines()[1].startswith("times: profile of a100-sxm4-80gb: 12 gemm, 2 softmax")
    assert "alignment: head_dim = 150 is no multiple of 8" in said
    # A shape whose product is one of the profile's: its figure comes back.
    of_known = ("--hidden", "4096", "--heads", "32", "--ffn", "4096", "--seq", "2048", "--layers", "1", "--top", "0")
    data = run_json("--profile", str(file), *of_known)
    down = next(op for op in data["ops"] if op["op"] == "mlp_down")
    assert (down["workload"]["m"], down["workload"]["n"], down["workload"]["k"]) == (2048, 4096, 4096)
    assert down["latency_us"] == pytest.approx(GEMMS[2048, 4096, 4096])
    assert " measured" in data["op_times"]
    with pytest.raises(InputError, match=r"advise: --gpu .* and --profile .*; expected one of them"):
        run("--profile", str(file), *WIDE)
    with pytest.raises(StoreError, match=r"expected"):
        run("--profile", str(tmp_path / "none.json"), *WIDE[2:])


def test_the_profile_of_a_processor_is_refused(tmp_path: Path) -> None:
    made = known_profile({})
    core = replace(made.device, name="cpu-made-up", kind="cpu", compute_capability=None)
    replace(made, device=core, cliffs=()).save(tmp_path / "cpu.json")
    with pytest.raises(InputError, match=r"advise: --profile .*cpu.json of cpu-made-up; expected the profile of a GPU"):
        run("--profile", str(tmp_path / "cpu.json"), *WIDE[2:])


def test_a_vocabulary_that_tp_does_not_divide_is_padded() -> None:
    said = run(*A100, "--model", "gpt2-xl", "--tp", "5", "--top", "0")
    assert "vocab padded from 50257 to 50560, as tp = 5 must divide it" in said


def test_the_gate(tmp_path: Path) -> None:
    junit = tmp_path / "new" / "advice.xml"
    said = run(*WIDE, "--top", "0", "--fail-over", "3%", "--junit", str(junit), code=1)
    assert "FAIL: " in said
    assert "wasted past edges, 3.0 % allowed" in said
    suite = ElementTree.parse(junit).getroot()[0]
    assert suite.get("failures") == "1"
    failure = suite.find("testcase[@name='waste past edges']/failure")
    assert failure is not None
    assert failure.get("message", "").endswith("% of the time is wasted past edges, 3.0 % allowed")
    assert "head_dim = 150 is no multiple of 8" in (suite.findtext("testcase[@name='scores']/system-out") or "")
    said = run(*WIDE, "--top", "0", "--fail-over", "90 %", "--junit", str(junit))
    assert "ok: " in said
    assert ElementTree.parse(junit).getroot()[0].get("failures") == "0"
    assert run_json(*WIDE, "--top", "0", "--fail-over", "3%", code=1)["failed"] is True
    with pytest.raises(StoreError, match=r"write JUnit: .* \(Is a directory\); expected a file that can be written"):
        run(*WIDE, "--top", "0", "--junit", str(tmp_path))


def test_a_good_shape_says_so() -> None:
    said = run(*A100, "--hidden", "4096", "--heads", "32", "--attention", "flash", "--tolerance", "0%")
    assert "Keep it" in said or "gain: more tokens per second" in said
    assert "--attention flash" not in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (*A100, "--hidden", "14400", "--heads", "97"),
            "advise: hidden = 14400 with heads = 97; expected hidden divis",
        ),
        ((*A100, "--hidden", "14400", "--heads", "96", "--tp", "7"), "advise: heads = 96 with tp = 7; expected heads"),
        ((*A100, "--hidden", "-5", "--heads", "4"), "--hidden: '-5'; expected an integer of at least 1"),
        ((*A100, "--hidden", "1e3", "--heads", "4"), "--hidden: '1e3'; expected an integer of at least 1"),
        ((*A100, "--hidden", "1024", "--heads", "0"), "--heads: '0'; expected an integer of at least 1"),
        ((*A100, "--hidden", "1024", "--heads", "16", "--kv-heads", "3"), "advise: kv_heads = 3; expected a divisor"),
        ((*A100, "--hidden", "1024", "--heads", "16", "--kv-heads", "2", "--tp", "4", "--ffn", "6"), "advise: ffn = 6"),
        ((*A100,), "advise: no --hidden and no --heads; expected --hidden and --heads, --model or --config"),
        ((*A100, "--hidden", "1024"), "advise: no --heads; expected --hidden and --heads, --model or --config"),
        (("--hidden", "1024", "--heads", "16"), "advise: no GPU; expected --gpu (quantbench devices lists them) or"),
        (("--gpu", "a999", "--hidden", "1024", "--heads", "16"), "device: 'a999'; expected a known GPU"),
        ((*A100, "--model", "llama-9"), "model: 'llama-9'; expected one of llama-3-8b"),
        (
            (*A100, "--model", "gpt2-xl", "--config", "x"),
            "advise: --model gpt2-xl and --config x; expected one of them",
        ),
        (
            (*A100, "--config", "/no/such/config.json"),
            "config /no/such/config.json: No such file or directory; expecte",
        ),
        ((*WIDE, "--fail-over", "3"), "--fail-over: '3'; expected a percentage from 0% to 100%, such as 3%"),
        ((*WIDE, "--fail-over", "x%"), "--fail-over: 'x%'; expected a percentage"),
        ((*WIDE, "--fail-over", "nan%"), "--fail-over: 'nan%'; expected a percentage"),
        ((*WIDE, "--fail-over", "-1%"), "--fail-over: '-1%'; expected a percentage"),
        ((*WIDE, "--tolerance", "80%"), "--tolerance: '80%'; expected a percentage from 0% to 50%, such as 3%"),
        ((*WIDE, "--tolerance", "100%"), "--tolerance: '100%'; expected a percentage from 0% to 50%, such as 3%"),
        ((*WIDE, "--top", "-1"), "--top: '-1'; expected an integer of at least 0"),
        ((*WIDE, "--attention", "paged"), "advise: --attention = 'paged'; expected one of eager, flash"),
        ((*WIDE, "--dtype", "fp8"), "advise: --dtype fp8 on a100-sxm4-80gb; expected one of bf16, fp16"),
        ((*WIDE, "--dtype", "bf61"), "advise: --dtype bf61 on a100-sxm4-80gb; expected one of bf16, fp16"),
        ((*WIDE, "--seq", "4000000"), "product 4000000×5400×14400: m = 4000000; expected at most 2097151"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as error:
        run(*words)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_of_the_page_run(line: str, tmp_path: Path) -> None:
    words = shlex.split(line.replace("/tmp/", f"{tmp_path}/"))
    assert run(*words, "--top", "1")


def test_the_python_of_the_page_says_what_it_says() -> None:
    assert len(COMMANDS) >= 5
    found = doctest.testfile(str(DOCS), module_relative=False)
    assert found.attempted >= 7
    assert found.failed == 0


def test_an_unreadable_config_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text('{"hidden_size": ')
    with pytest.raises(InputError, match=r"expected a JSON object"):
        run(*A100, "--config", str(broken))


def test_it_runs_from_the_shell_without_torch_or_pandas() -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['quantbench', 'advise', *{list(WIDE)!r}, '--fail-over', '3%']\n"
        "from quantbench.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as end: print('ended with', end.code)\n"
        "heavy = ('torch', 'triton', 'pandas', 'scipy', 'sklearn', 'matplotlib', 'seaborn')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-2:] == ["ended with 1", "[]"], done.stderr
