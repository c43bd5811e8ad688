"""What a run says of the rows that each provider adds to the experts' rows."""

from dataclasses import replace

import made_runs
import pytest
from made_devices import A100, CPU

from quantbench.analysis.check import check_run
from quantbench.launch import Launch, Tile
from quantbench.quantization import quantize
from quantbench.report.sections import steps_section
from quantbench.store.folder import Run
from quantbench.workload import GroupedGemm

TILE = Tile(128, 256)
SIZES = tuple(range(64, 1025, 32))  # tokens of each of 8 experts


def run(provider: str, launch: Launch | None) -> Run:
    """Times that grow with the waves of padded tiles where there is a launch, else with the
    rows.
    """
    records = []
    for tokens in SIZES:
        work = GroupedGemm((tokens,) * 8, n=4096, k=4096)
        waves = quantize(work, TILE, A100.sm_count).num_waves
        middle_us = 100.0 * waves if launch else 1e-3 * work.rows * 100
        samples = made_runs.samples(middle_us, noise=0.002, count=12, seed=tokens)
        records.append(
            made_runs.record(
                work,
                samples,
                {"tokens": tokens},
                op="experts_down",
                provider=provider,
                launch=launch,
            )
        )
    return made_runs.run(records, device=A100 if launch else CPU)


def test_a_kernel_with_tiles_pads_and_its_steps_are_wave_edges() -> None:
    launch = Launch("grouped_data_parallel", blocks_per_sm=1, tile=TILE)
    found = check_run(run("triton.grouped", launch))
    words = "triton.grouped multiplies each expert's rows padded to tiles of 128 rows: at most 512 rows to 1,024"
    assert found.padding == (f"{words} (+100 %) at tokens = 64",)
    assert found.cliffs
    for cliff in found.cliffs:
        assert cliff.cause.kind == "wave edge"
        assert cliff.at % 128 == 0  # tokens per expert that fill their tiles
    section = steps_section(found)
    assert section.lines[0] == found.padding[0]


def test_a_loop_of_products_pads_nothing() -> None:
    found = check_run(run("torch.grouped_loop", None))
    (line,) = found.padding
    assert line.startswith(
        "torch.grouped_loop multiplies each expert's rows as they are and pads none"
    )
    assert line.endswith(
        "a kernel with tiles of 128 rows would pad 512 rows to 1,024 (+100 %) at tokens = 64"
    )
    assert not found.cliffs


def test_waves_of_a_loop_are_not_those_of_all_experts_together() -> None:
    """The tile of one of its products is recorded, and it steps where a grouped kernel would."""
    launch = Launch("some_gemm", blocks_per_sm=1, tile=TILE)
    found = check_run(run("torch.grouped_loop", launch))
    assert found.cliffs
    for cliff in found.cliffs:
        assert cliff.cause.kind == "unexplained"
        assert "one after the other" in cliff.cause.words


@pytest.mark.parametrize("launch", [None, Launch("some_kernel")])
def test_nothing_is_claimed_of_an_unknown_tile(launch: Launch | None) -> None:
    records = [
        replace(one, launch=launch)
        for one in run("torch.grouped_mm", Launch("k", tile=TILE)).records
    ]
    (line,) = check_run(made_runs.run(records, device=A100)).padding
    assert line.endswith("by a kernel whose tile is not known: whether it pads them cannot be told")
