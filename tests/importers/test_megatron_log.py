"""Training logs: both forms of the documents, prefixes, ranks, restarts, cut lines, nan; and what
is left of them.
"""

import gzip
import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from commands import run, run_json
from foreign_texts import MS_LINE, S_LINE
from foreign_texts import log_line as line
from hypothesis import given, settings
from hypothesis import strategies as st

from quantbench.errors import InputError, StoreError
from quantbench.importers import megatron_log
from quantbench.importers.megatron_log import COLUMNS, Iterations, read_log, read_stream
from quantbench.importers.training_run import summarize
from quantbench.planner.formulas import model_flops
from quantbench.planner.rows import read_table
from quantbench.workload.presets import preset


def read(lines: Sequence[str]) -> Iterations:
    return read_stream(io.BytesIO("\n".join(lines).encode() + b"\n"))


def column(found: Iterations, name: str) -> list[float]:
    return [float(v) for v in found.values[name]]


def test_the_line_of_001() -> None:
    found = read([MS_LINE])
    assert column(found, "iteration") == [2]
    assert column(found, "elapsed_s") == [5.35]
    assert column(found, "loss") == [11.19602]
    assert column(found, "tflops") == [48.77]
    # The document: samples per second times sequence length = 73 498.624 (it has 73 498,644).
    assert found.tokens_per_s[0] == pytest.approx(35.888 * 2048, rel=1e-4)


def test_the_line_of_003() -> None:
    found = read([S_LINE])
    assert column(found, "elapsed_s") == [769.99]
    assert column(found, "gbs") == [2048]
    assert found.seq[0] == 2048  # consumed tokens over consumed samples
    assert found.tokens_per_s[0] == pytest.approx(2048 * 2048 / 769.99)
    assert column(found, "tflops") == [108.47]


def test_lines_of_other_things_are_passed_over() -> None:
    noise = [
        "Loading extension module",
        "time (ms) | forward-compute: 3041.31 | optimizer: 12.3",
        "",
        "| iteration |",
    ]
    found = read([*noise, line(1), *noise, line(2), *noise])
    assert column(found, "iteration") == [1, 2]
    assert not found.left_out


def test_a_line_whose_beginning_is_lost_is_counted_and_passed_over() -> None:
    found = read([line(1), line(2)[40:], line(3), "elapsed time per iteration"])
    assert column(found, "iteration") == [1, 3]
    assert found.left_out == {"without an iteration": 2}


def test_kinds_of_line_that_alternate_keep_their_order() -> None:
    kinds = [
        lambda i: line(i),
        lambda i: S_LINE.replace("       2/", f"{i:8d}/"),
        lambda i: line(i)[:180],
    ]
    lines = [kinds[i % 3](i) for i in range(1, 10_000)]
    found = read(lines)
    assert column(found, "iteration") == [i for i in range(1, 10_000) if i % 3 != 2]
    assert found.left_out == {"cut short before the batch size": 3333}


@pytest.mark.parametrize(
    "prefix", ["", " ", "[default0]:", "7: ", "2022-03-11 19:42:00,123 [Rank 383] ", "r10i1n2: "]
)
def test_prefixes(prefix: str) -> None:
    found = read([line(i, prefix=prefix) for i in range(1, 400)])
    assert column(found, "iteration") == list(range(1, 400))
    assert not found.left_out


def test_ranks_that_print_the_same_iteration() -> None:
    lines = [line(i, prefix=f"[default{rank}]: ") for i in range(1, 50) for rank in range(4)]
    found = read(lines)
    assert column(found, "iteration") == list(range(1, 50))
    assert found.left_out == {"repeated by another rank": 3 * 49}
    assert found.segment.max() == 0


def test_two_ranks_on_one_line() -> None:
    whole = line(5)
    half = line(5, prefix="[default3]: ")[:150]
    found = read([*(line(i) for i in range(1, 5)), half + whole, line(6)])
    assert column(found, "iteration") == [1, 2, 3, 4, 5, 6]
    found = read([line(1) + line(2), line(3)])
    assert column(found, "iteration") == [1, 2, 3]


@pytest.mark.parametrize("cut", [30, 100, 131, 150, 165, 200, 220, 240, 250, 300, 340])
def test_a_line_cut_short_never_gives_half_a_number(cut: int) -> None:
    lines = [line(i) for i in range(1, 6)]
    lines[2] = lines[2][:cut]
    found = read(lines)
    whole = read([line(3)])
    kept = {int(i): row for row, i in enumerate(found.values["iteration"])}
    assert {1, 2, 4, 5} <= kept.keys()
    if 3 in kept:
        for name in COLUMNS:
            value = found.values[name][kept[3]]
            assert np.isnan(value) or value == whole.values[name][0], name
        assert np.isfinite(found.values["gbs"][kept[3]])


def test_a_first_line_cut_at_a_bar_does_not_hide_the_fields_of_the_others() -> None:
    first = line(1)
    cut = first[: first.index(" samples per second")]
    assert cut.endswith("|")
    found = read([cut, *(line(i) for i in range(2, 400))])
    assert np.isnan(found.values["tflops"][0])
    assert (found.values["tflops"][1:] == 48.77).all()


def test_nan_and_infinite_values() -> None:
    found = read(
        [line(1), line(2, loss="nan"), line(3, loss="inf"), line(4, elapsed="nan"), line(5)]
    )
    assert column(found, "iteration") == [1, 2, 3, 5]
    assert np.isnan(found.values["loss"][1])
    assert np.isinf(found.values["loss"][2])
    assert found.left_out == {"with an invalid time": 1}


def test_restarts_are_segments_and_repeated_work_counts_once() -> None:
    lines = (
        [line(i) for i in range(1, 11)]
        + [line(i, elapsed=6000.0) for i in range(6, 13)]
        + [line(1, elapsed=1.0)]
    )
    found = read(lines)
    assert found.segment.tolist() == [0] * 10 + [1] * 7 + [2]
    assert summarize("x", found).iterations == 12


def test_degrees_from_what_megatron_prints() -> None:
    said = [
        "using world size: 384, data-parallel-size: 8, tensor-model-parallel size: 4, pipeline-model-parallel size: 12",
        "  micro_batch_size ................................ 2",
        "  seq_length ...................................... 2048",
        "  tensor_model_parallel_size ...................... 4",
    ]
    found = read([*said, line(1)])
    assert found.arguments == {"gpus": 384, "dp": 8, "tp": 4, "pp": 12, "mbs": 2, "seq": 2048}


def test_blocks_end_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line(i) for i in range(1, 60)]
    for size in (64, 333, 1000, 5000):
        monkeypatch.setattr(megatron_log, "_BLOCK_BYTES", size)
        assert column(read(lines), "iteration") == list(range(1, 60))


@settings(deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=60), max_size=8), st.integers(0, 7))
def test_whatever_stands_between_whole_lines_they_are_read(noise: list[str], where: int) -> None:
    clean = [text.replace("\n", " ").replace("elapsed time per iteration", "") for text in noise]
    lines = [line(i) for i in range(1, 9)]
    lines[where:where] = clean
    assert column(read(lines), "iteration") == list(range(1, 9))


def test_a_log_without_iterations_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.log"
    file.write_text("nothing\n" + line(1)[:120] + "\n")
    with pytest.raises(InputError, match=r"import training log: empty\.log holds no iteration"):
        read_log(file)
    with pytest.raises(StoreError, match="a log that can be read"):
        read_log(tmp_path / "missing.log")


def test_compressed_logs(tmp_path: Path) -> None:
    file = tmp_path / "train.log.gz"
    file.write_bytes(gzip.compress("\n".join(line(i) for i in range(1, 30)).encode()))
    assert len(read_log(file)) == 29


def test_a_summary_leaves_the_first_iteration_out() -> None:
    times = [60_000.0, 5000.0, 5100.0, 5200.0]
    found = read([line(i, elapsed=t, loss=10 - i) for i, t in enumerate(times, start=1)])
    summary = summarize("x", found)
    assert summary.sec_per_it == 5.1
    assert summary.tokens_per_s == pytest.approx(192 * 2048 / 5.1)
    assert (summary.arguments, summary.iterations) == ({"gbs": 192, "seq": 2048}, 4)
    assert (summary.first_loss, summary.last_loss, summary.tflops) == (9, 6, 48.77)
    assert summarize("y", read([line(1)])).sec_per_it == 5.35


def test_a_batch_that_grows_is_judged_at_its_last_size() -> None:
    small = line(1, elapsed=1000.0).replace("batch size:   192", "batch size:    16")
    found = read([small, small.replace("       1/", "       2/"), *(line(i) for i in range(3, 9))])
    assert summarize("x", found).sec_per_it == 5.35


def log_of_8_gpus(folder: Path, tp: int, iteration_ms: float) -> Path:
    log = folder / f"tp{tp}.log"
    start = (
        f"using world size: 8, data-parallel-size: {8 // tp}, tensor-model-parallel size: {tp}, "
    )
    body = [line(i, elapsed=iteration_ms + i) for i in range(1, 20)]
    body += ["torn line | elapsed time per iteration"]
    log.write_text("\n".join([start + "pipeline-model-parallel size: 1", *body]) + "\n")
    return log


def test_the_command(tmp_path: Path) -> None:
    slow = log_of_8_gpus(tmp_path, 1, 5000.0)
    fast = log_of_8_gpus(tmp_path, 2, 4000.0)
    words = f"import megatron-log {slow} {fast} --gpu a100-sxm4-80gb --mbs 2"
    said = run(words)
    assert re.search(rf"most tokens per GPU: \d+ a second in {fast}\n", said)
    assert "tp1.log: 1 lines left out: without an iteration" in said
    data = run_json(words)
    assert [(d["arguments"]["tp"], d["iterations"]) for d in data] == [(1, 19), (2, 19)]
    within = data[1]["tokens_per_s_within"]
    assert within["low"] <= data[1]["tokens_per_s"] <= within["high"]


def test_logs_of_one_name_are_told_apart_and_what_is_missing_is_said(tmp_path: Path) -> None:
    logs = [tmp_path / folder / "train.log" for folder in ("a", "b")]
    for log in logs:
        log.parent.mkdir()
        log.write_text(f"{line(1)}\n")
    said = run(f"import megatron-log {logs[0]} {logs[1]} --gpu a100-sxm4-80gb")
    assert all(str(log) in said for log in logs)
    assert "the logs do not give GPUs and tokens: --gpus, --seq" in said


PRINTED = """\
  bf16 ............................................ True
  context_parallel_size ........................... 2
  ffn_hidden_size ................................. 14336
  group_query_attention ........................... True
  hidden_dropout .................................. 0.0
  hidden_size ..................................... 4096
  kv_channels ..................................... 128
  num_attention_heads ............................. 32
  num_experts ..................................... None
  num_layers ...................................... 32
  num_query_groups ................................ 8
  padded_vocab_size ............................... 128256
  recompute_granularity ........................... selective
  sequence_parallel ............................... True
  swiglu .......................................... True
  untie_embeddings_and_output_weights ............. True
  use_distributed_optimizer ....................... True
"""


@pytest.mark.parametrize(("factor", "disagrees"), [(1.0, False), (1.04, False), (1.2, True)])
def test_the_throughput_that_megatron_states_is_held_against_the_sizes(
    tmp_path: Path, factor: float, disagrees: bool
) -> None:
    llama = preset("llama-3-8b")
    stated = factor * model_flops(llama, 128) / (10.0 * 64) / 1e12
    steps = [
        f" iteration {i:8d}/     100 | consumed samples: {128 * i} | elapsed time per iteration (ms): 10000.0 | "
        f"throughput per GPU (TFLOP/s/GPU): {stated:.1f} | learning rate: 3.0E-05 | global batch size:   128 |"
        for i in range(1, 5)
    ]
    sizes = "  seq_length ...................................... 8192\n  world_size .......... 64\n"
    log = tmp_path / "lm.log"
    log.write_text(PRINTED + sizes + "\n".join(steps) + "\n")
    words = f"import megatron-log {log} --gpu h100"
    (summary,) = run_json(words)
    assert summary["tflops"] == pytest.approx(stated, abs=0.05)
    said = run(words)
    assert ("the log states" in said) == disagrees
    if disagrees:
        assert f"give {stated / 1.2:.1f} of model FLOPs" in said


def test_rows_keep_the_arguments_of_the_log(tmp_path: Path) -> None:
    log, rows = tmp_path / "nemo.log", tmp_path / "rows.csv"
    iterations = "".join(
        f"Training epoch 0, iteration {n}/99 | lr: 4e-06 | global_batch_size: 128 | global_step: {n} | "
        f"reduced_train_loss: 11.03 | train_step_timing in s: {0.1 + 0.2 + 7 * (n == 0)} | consumed_samples: {n}\n"
        for n in range(6)
    )
    log.write_text(
        PRINTED + "  world_size ...................................... 64\n" + iterations
    )
    layout = "--gpu H100 --tp 4 --pp 2 --mbs 1 --seq 4096"
    said = run(f"import megatron-log {log} {layout} --rows {rows}")
    assert said.endswith(f"Next: quantbench plan --rows {rows}, or plan --fit {rows} --stack …\n")
    (row,) = read_table(rows)
    assert row.row_id == str(log)
    assert (row.gpus, row.tp, row.pp, row.cp, row.mbs) == (64, 4, 2, 2, 1)
    assert (row.gbs, row.seq) == (128, 4096)
    assert row.sec_per_it == 0.3  # without the first, and without the digits of a sum of floats
    assert (row.layers, row.hidden, row.heads) == (32, 4096, 32)
    assert (row.kv_heads, row.head_dim, row.ffn) == (8, 128, 14336)
    assert (row.gated, row.tied, row.sequence_parallel, row.dropout) == (True, False, True, False)
    assert (row.recompute, row.zero, row.precision, row.experts) == ("selective", 1, "bf16", None)
    log.write_text(
        PRINTED.replace("attention ........................... True", "attention ... False")
        + iterations
    )
    assert (
        read_log(log).arguments["kv_heads"] == 32
    )  # one group is printed where groups are not used
