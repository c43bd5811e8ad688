"""`quantbench advise` as it is typed: what it prints, its JSON, its gate, how it refuses, what it
leaves unloaded.
"""

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

from quantbench.__main__ import main
from quantbench.cli.advise import advise
from quantbench.device import lookup
from quantbench.errors import InputError, StoreError
from quantbench.sweep.options import SweepOptions, plan_sweep
from quantbench.sweep.shape_file import read_shape_file
from quantbench.workload import Gemm, TransformerShape, workload_from_json

DOCS = Path(__file__).parents[2] / "docs" / "advising.md"
COMMANDS = re.findall(r"^quantbench advise (.*)$", DOCS.read_text(encoding="utf-8"), re.M)
LIBRARY = "library = sglang (the default: the largest table of 3)"
A100 = ("--gpu", "a100-sxm4-80gb")
WIDE = (*A100, "--hidden", "14400", "--heads", "96", "--tp", "8", "--attention", "unfused")

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
    said = run(*WIDE, "--top", "8")
    lines = said.splitlines()
    # What rests on no measurement comes before anything else.
    assert lines[0].startswith("not measured, only estimated: ")
    assert "batched products of unaligned rows: at a rate fitted to whole iterations" in lines[0]
    assert "softmax: none measured on a100-sxm4-80gb (" in lines[0]
    assert lines[1].startswith("a100-sxm4-80gb: 108 SMs (sm_80), 80 GiB at 2039 GB/s")
    assert lines[2].startswith("times: products on a100-sxm4-80gb: fitted on")
    assert "90 layers of 14400, 96 heads of 150, ffn 57600" in lines[3]
    assert "layers = 90 (hidden / 160), vocab = 51200, seq = 2048" in lines[4]
    assert "mbs = 1" in lines[4]
    assert lines[5] == (
        "tried: parameters within ±5.0 %; hidden within ±10 % in steps of 128; head_dim 64, 128, 256 or as it is; "
        "kv_heads that tp divides or as they are"
    )
    worst = next(i for i, line in enumerate(lines) if line.startswith("op ")) + 1
    assert lines[worst].startswith(("scores", "context"))
    assert (
        "alignment: head_dim = 150 is no multiple of 8: rows aligned to 4 bytes, not 16"
        in lines[worst]
    )
    assert "GPU-hours per trillion tokens" in said
    assert "wasted past edges: " in said
    assert re.search(
        r"^Worth a change: of \d+ shapes tried, hidden 14400 → .* is surely faster, by \+\d+ % ",
        said,
        re.M,
    )
    assert "better shapes (● best gain for the smallest change)" in said
    assert "hidden 14400 → 14336" in said
    assert re.search(r"head_dim 150 → \d+: 16-byte aligned", said)
    assert "better with one change alone" in said
    assert lines[-2].endswith("ask with --attention flash")
    assert re.match(
        r"Next: repeat this with -o shapes.json; on such a card, quantbench sweep --shapes",
        lines[-1],
    )
    assert "\x1b[" not in said


def test_everything_as_json() -> None:
    data = run_json(
        *WIDE,
        "--layers",
        "80",
        "--vocab",
        "250880",
        "--mbs",
        "2",
        "--seq",
        "1024",
        "--top",
        "3",
    )
    assert data["device"] == "a100-sxm4-80gb"
    assert data["assumed"] == [
        "Megatron's fused softmax",
        "no dropout",
        "one matrix for embedding and logits",
        "dtype = bf16",
        LIBRARY,
    ]
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
    assert list(data)[:4] == ["format", "version", "device", "missing"]
    assert data["unmeasured"][0]["share"] > 0.1
    assert data["keep"] is False
    assert len(data["neighbours"]) == 3
    for neighbour in data["neighbours"]:
        assert abs(neighbour["parameters_change"]) <= 0.05
        assert neighbour["gain_low"] < neighbour["gain"] < neighbour["gain_high"]
        assert neighbour["surely_faster"] == (neighbour["gain_low"] > 0)
        assert neighbour["reasons"]


def test_a_narrow_terminal_loses_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantbench.cli.output._PIPE_WIDTH", 80)
    lines = run(*WIDE).splitlines()
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
    data = run_json(
        *A100, "--model", "llama-2-7b", "--attention", "flash", "--tp", "2", "--top", "0"
    )
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
    data = run_json(
        *A100,
        "--config",
        str(config),
        "--hidden",
        "2048",
        "--heads",
        "32",
        "--kv-heads",
        "8",
        "--top",
        "0",
    )
    assert (data["shape"]["hidden"], data["shape"]["head_dim"], data["shape"]["ffn"]) == (
        2048,
        64,
        5632,
    )
    assert (data["shape"]["kv_heads"], data["shape"]["layers"], data["shape"]["seq"]) == (
        8,
        8,
        1024,
    )


def test_a_profile_takes_the_place_of_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    known_profile().save(file)
    said = run("--profile", str(file), *WIDE[2:], "--top", "1")
    assert said.splitlines()[0].startswith("not measured, only estimated: ")
    assert "products: beyond the rows of the profile" in said.splitlines()[0]
    assert said.splitlines()[2].startswith("times: profile of a100-sxm4-80gb: 12 gemm, 2 softmax")
    assert "alignment: head_dim = 150 is no multiple of 8" in said
    # A shape whose product is one of the profile's: its figure comes back.
    of_known = (
        "--hidden",
        "4096",
        "--heads",
        "32",
        "--ffn",
        "4096",
        "--seq",
        "2048",
        "--layers",
        "1",
        "--top",
        "0",
    )
    data = run_json("--profile", str(file), *of_known)
    down = next(op for op in data["ops"] if op["op"] == "mlp_down")
    assert (down["workload"]["m"], down["workload"]["n"], down["workload"]["k"]) == (
        2048,
        4096,
        4096,
    )
    assert down["latency_us"] == pytest.approx(GEMMS[2048, 4096, 4096])
    assert " measured" in data["op_times"]
    with pytest.raises(
        InputError, match=r"advise: --gpu .* and --profile .*; expected one of them"
    ):
        run("--profile", str(file), *WIDE)
    with pytest.raises(StoreError, match=r"expected"):
        run("--profile", str(tmp_path / "none.json"), *WIDE[2:])


def test_the_profile_of_a_processor_is_refused(tmp_path: Path) -> None:
    made = known_profile({})
    core = replace(made.device, name="cpu-made-up", kind="cpu", compute_capability=None)
    replace(made, device=core, cliffs=()).save(tmp_path / "cpu.json")
    with pytest.raises(
        InputError,
        match=r"advise: --profile .*cpu.json of cpu-made-up; expected the profile of a GPU",
    ):
        run("--profile", str(tmp_path / "cpu.json"), *WIDE[2:])


def test_a_vocabulary_that_tp_does_not_divide_is_padded() -> None:
    said = run(*A100, "--model", "gpt2-xl", "--tp", "5", "--top", "0")
    assert "vocab padded from 50257 to 50560, as tp = 5 must divide it" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--model", "gpt2-xl", "--tp", "2"),
            "heads = 25 with tp = 2; expected heads divisible by tp: 24 or 26",
        ),
        (
            ("--model", "gpt2-xl", "--tp", "64"),
            "heads = 25 with tp = 64; expected heads divisible by tp: 64",
        ),
        (
            ("--model", "falcon-7b", "--tp", "2"),
            "heads = 71 with tp = 2; expected heads divisible by tp: 70 or 72",
        ),
        (
            ("--hidden", "4096", "--heads", "32", "--ffn", "1001", "--tp", "8"),
            "ffn divisible by tp: 1000 or 1008",
        ),
    ],
)
def test_what_tp_cannot_split_is_refused_with_the_nearest_sizes(
    words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message) + "$"):
        run(*A100, *words)


def test_a_shape_that_none_surely_beats_is_kept() -> None:
    words = ("--gpu", "h100-sxm5-80gb", "--model", "llama-3-8b", "--attention", "flash")
    said = run(*words)
    assert said.startswith("not measured, only estimated: ")
    assert "(every gain is within the error of the times)" in said
    assert re.search(r"^Keep it: of \d+ shapes tried none is surely faster", said, re.M)
    assert "better" not in said
    assert "candidates" not in said
    assert "all ops, each wasting less than 0.5 % (" in said
    assert not any(line.startswith("op ") for line in said.splitlines())
    asked = run(*words, "--top", "3")
    assert "candidates, none of them surely faster: measure before you move" in asked
    assert "better shapes" not in asked
    assert run_json(*words)["keep"] is True


def test_small_waste_shares_a_line() -> None:
    said = run(*A100, "--model", "gpt2-xl", "--attention", "flash")
    rows = [line.split()[0] for line in said.splitlines() if re.match(r"\S+ .*\d–\d.*\d–\d", line)]
    assert "logits" in rows
    assert "qkv" not in rows
    assert re.search(
        r"^the others, each wasting less than 0.5 % \(.* together\): .*qkv \d+ µs", said, re.M
    )


def test_constraints_are_shown_and_kept() -> None:
    data = run_json(*WIDE, "--keep", "hidden,ffn,layers")
    assert data["space"]["keep"] == ["hidden", "ffn", "layers"]
    assert {(n["shape"]["hidden"], n["shape"]["layers"]) for n in data["neighbours"]} <= {
        (14400, 90)
    }
    said = run(*WIDE, "--keep", "hidden,kv-heads", "--top", "1")
    assert "kv_heads that tp divides or as they are; kept: hidden, kv_heads" in said


def test_the_file_it_writes_is_planned_as_it_was_compared(tmp_path: Path) -> None:
    """Every op of every shape that advise compared, forward and backward, and nothing else."""
    file = tmp_path / "shapes.json"
    qwen = (
        "--gpu",
        "h100-sxm5-80gb",
        "--model",
        "qwen2.5-14b",
        "--tp",
        "2",
        "--attention",
        "flash",
    )
    data = run_json(*qwen, "-o", str(file))
    shapes = [data["shape"], *(n["shape"] for n in (*data["neighbours"], *data["one_change"]))]
    compared = {op.workload for shape in shapes for op in TransformerShape(**shape).ops()}
    options = SweepOptions((), models=read_shape_file(file), providers=("torch.mm", "torch.flash"))
    _, plan = plan_sweep(options, lookup("h100-sxm5-80gb"))
    assert {point.workload for point in plan.points} == compared
    assert not plan.left_out
    asked = {op["op"]: workload_from_json(op["workload"]) for op in data["ops"]}
    first = {
        p.op: point.workload
        for point in plan.points
        for p in point.places
        if p.axes == {"shape": 1}
    }
    assert first == asked
    qkv = first["qkv"]
    assert isinstance(qkv, Gemm)
    assert qkv.n == (40 + 2 * 8) * 128 // 2  # 3584 on each of two GPUs: 7168 in all
    assert f"shapes: {file}" in run(*qwen, "-o", str(file))
    last = run(*qwen, "-o", str(file)).splitlines()[-1]
    assert re.fullmatch(
        rf"Next, on such a card \(measures every op of .*\): quantbench sweep --shapes {file}", last
    )
    with pytest.raises(
        InputError, match=r"--shapes-out: .*x.csv; expected a name that ends in .json"
    ):
        run(*qwen, "-o", str(tmp_path / "x.csv"))
    run(*qwen, "-o", str(tmp_path / "new" / "s.json"))
    assert (tmp_path / "new" / "s.json").read_text() == file.read_text()


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
    assert "head_dim = 150 is no multiple of 8" in (
        suite.findtext("testcase[@name='scores']/system-out") or ""
    )
    said = run(*WIDE, "--top", "0", "--fail-over", "90 %", "--junit", str(junit))
    assert "ok: " in said
    assert ElementTree.parse(junit).getroot()[0].get("failures") == "0"
    assert run_json(*WIDE, "--top", "0", "--fail-over", "3%", code=1)["failed"] is True
    with pytest.raises(
        StoreError, match=r"write JUnit: .* \(Is a directory\); expected a file that can be written"
    ):
        run(*WIDE, "--top", "0", "--junit", str(tmp_path))


def test_a_good_shape_says_so() -> None:
    said = run(
        *A100, "--hidden", "4096", "--heads", "32", "--attention", "flash", "--tolerance", "0%"
    )
    assert "Keep it" in said or "gain: more tokens per second" in said
    assert "ask again" not in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (*WIDE, "--keep", "depth"),
            "advise: --keep = 'depth'; expected one of hidden, heads, kv_heads, head_dim",
        ),
        (
            (*A100, "--hidden", "14400", "--heads", "97"),
            "advise: hidden = 14400 with heads = 97; expected hidden divis",
        ),
        (
            (*A100, "--hidden", "1024", "--heads", "16", "--kv-heads", "3"),
            "advise: kv_heads = 3; expected a divisor",
        ),
        (
            (*A100,),
            "advise: no --hidden and no --heads; expected --model, --config, or all of --hidden",
        ),
        (
            (*A100, "--hidden", "1024"),
            "advise: no --heads; expected --model, --config, or all of --hidden, --heads",
        ),
        (
            ("--hidden", "1024", "--heads", "16"),
            "advise: no GPU; expected --gpu (quantbench devices lists them) or",
        ),
        (
            ("--gpu", "a999", "--hidden", "1024", "--heads", "16"),
            "device: 'a999'; expected a known GPU",
        ),
        ((*A100, "--model", "llama-9"), "model: 'llama-9'; expected one of llama-3-8b"),
        (
            (*A100, "--model", "gpt2-xl", "--config", "x"),
            "advise: --model gpt2-xl and --config x; expected one of them",
        ),
        (
            (*A100, "--config", "/no/such/config.json"),
            "config /no/such/config.json: No such file or directory; expecte",
        ),
        (
            (*A100, "--model", "llama-3-8b", "--routing", "power_law_1.2"),
            "advise: --routing power_law_1.2 without experts; expected --experts, or a model with experts",
        ),
        (
            (*A100, "--model", "llama-3-8b", "--ep", "4"),
            "advise: --ep 4 without experts; expected --experts, or a m",
        ),
        (
            (*A100, "--model", "mixtral-8x7b", "--ep", "3"),
            "advise: experts = 8 with ep = 3; expected experts divisible by ep",
        ),
        (
            (*WIDE, "--fail-over", "3"),
            "--fail-over: '3'; expected a percentage from 0% to 100%, such as 3%",
        ),
        ((*WIDE, "--fail-over", "x%"), "--fail-over: 'x%'; expected a percentage"),
        ((*WIDE, "--fail-over", "nan%"), "--fail-over: 'nan%'; expected a percentage"),
        ((*WIDE, "--fail-over", "-1%"), "--fail-over: '-1%'; expected a percentage"),
        (
            (*WIDE, "--tolerance", "80%"),
            "--tolerance: '80%'; expected a percentage from 0% to 50%, such as 3%",
        ),
        (
            (*WIDE, "--tolerance", "100%"),
            "--tolerance: '100%'; expected a percentage from 0% to 50%, such as 3%",
        ),
        (
            (*WIDE, "--attention", "paged"),
            "advise: --attention = 'paged'; expected one of flash, unfused",
        ),
        (
            (*WIDE, "--dtype", "fp8"),
            "advise: --dtype fp8 on a100-sxm4-80gb; expected one of bf16, fp16",
        ),
        (
            (*WIDE, "--dtype", "bf61"),
            "advise: --dtype bf61 on a100-sxm4-80gb; expected one of bf16, fp16",
        ),
        (
            (*WIDE, "--seq", "4000000"),
            "product 4000000×5400×14400: m = 4000000; expected at most 2097151",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as error:
        run(*words)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.slow
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


@pytest.mark.slow
def test_it_runs_from_the_shell_without_torch_or_pandas(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['quantbench', 'advise', *{list(WIDE)!r}, '--fail-over', '3%', '-o', '{tmp_path}/s.json']\n"
        "from quantbench.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as end: print('ended with', end.code)\n"
        "heavy = ('torch', 'triton', 'pandas', 'scipy', 'sklearn', 'matplotlib', 'seaborn')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-2:] == ["ended with 1", "[]"], done.stderr


@pytest.mark.parametrize("size", ["-5", "1e3", "0", "9" * 5000])
def test_a_size_that_is_no_integer_of_at_least_1_is_one_line(
    size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["quantbench", "advise", *A100, "--hidden", size, "--heads", "4"]
    )
    with pytest.raises(SystemExit) as caught:
        main()
    said = capsys.readouterr().err
    assert (caught.value.code, said.count("\n")) == (2, 1)
    assert said.startswith("quantbench: advise: invalid value for '--hidden'")
