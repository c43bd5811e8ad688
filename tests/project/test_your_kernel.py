"""docs/your-kernel.md: its kernel is right, its commands run, its waves are named (on a simulated
GPU).
"""

import json
from pathlib import Path

import pytest
from commands import python, run, run_json
from interpreter import in_interpreter
from simulator import SimulatedGpu, along, records_of, write_simulated
from test_docs_pages import DOCS, ENVIRONMENT, ROOT, blocks

from quantbench.launch import Tile
from quantbench.store.folder import read_run
from quantbench.workload import Gemm

KERNEL, BENCHMARK = blocks(DOCS / "your-kernel.md", "python")
MINE = "tile_gemm:TileGemm"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tile_gemm.py").write_text(KERNEL)
    (tmp_path / "test_tile_gemm.py").write_text(BENCHMARK)
    return tmp_path


def interpreted(folder: Path, *words: str) -> str:
    environment = {
        **ENVIRONMENT,
        "TRITON_INTERPRET": "1",
        "SIZE": "130",
        "PYTHONPATH": f"{ROOT}:{folder}",
    }
    return python("-m", *words, cwd=folder, env=environment)


@pytest.mark.slow
@in_interpreter
def test_the_kernel_of_the_page_is_checked_and_its_interpreted_times_are_rejected(
    folder: Path,
) -> None:
    page = (DOCS / "your-kernel.md").read_text()
    words = page.partition("\nTRITON_INTERPRET=1 ")[2].splitlines()[0].split()
    interpreted(folder, *words[1:])
    (made,) = folder.glob("results/*/*")
    records = [record for record in read_run(made).records if record.role == "point"]
    found = {(record.provider, record.workload.n): record for record in records}
    assert sorted(found) == [(MINE, 129), (MINE, 200), ("torch.mm", 129), ("torch.mm", 200)]
    for (provider, _), record in found.items():
        assert record.check is not None, record.outcome
        assert (record.outcome.grade.letter == "rejected") == (provider == MINE)
    launch = found[MINE, 200].launch
    assert (launch.kernel, launch.grid) == ("tile_gemm", (4, 1, 1))
    assert launch.tile == Tile(128, 128, block_k=64, stages=3, num_warps=8)
    (folder / "wrong.py").write_text(KERNEL.replace("depth = start + ", "depth = "))
    with pytest.raises(AssertionError, match="2 wrong"):
        interpreted(folder, *words[1:-1], "wrong:TileGemm")


@pytest.mark.slow
@in_interpreter
def test_the_benchmark_of_the_page_keeps_no_interpreted_time(folder: Path) -> None:
    words = ("--benchmark-group-by=param:n", "--benchmark-json=out.json", "--device-max-time=20ms")
    told = interpreted(
        folder, "pytest", "-qrs", "-p", "no:cacheprovider", "--benchmark-only", *words
    )
    assert "it ran in triton's interpreter" in told
    found = json.loads((folder / "out.json").read_text())["benchmarks"]
    assert [one["params"]["provider"] for one in found] == ["torch.mm"] * 2


def test_the_gate_of_the_page_judges_only_the_kernel_of_the_page(folder: Path) -> None:
    page = (DOCS / "your-kernel.md").read_text()
    name = page.partition("--benchmark-only -k ")[2].split()[0]
    told = interpreted(folder, "pytest", "--collect-only", "-qp", "no:cacheprovider", "-k", name)
    assert told.count("::") == told.count(MINE) == 2


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of both providers on a simulated GPU, whose own kernel has the tile that the page
    declares.
    """
    grid = along("n", range(3072, 8193, 128), Gemm(4096, 1, 4096, dtype="bf16"))
    results = tmp_path_factory.mktemp("results")
    mine = SimulatedGpu(108, Tile(128, 128, block_k=64, stages=3, num_warps=8), tile_ns_per_k=12.0)
    library = SimulatedGpu(108, Tile(128, 256), tile_ns_per_k=20.0)
    both = [
        *records_of(mine, grid, noise=0.002, seed=1, launches=True, provider=MINE),
        *records_of(library, grid, noise=0.002, seed=2, launches=True, provider="torch.mm"),
    ]
    return write_simulated(results, library, both)


def test_check_names_the_waves_of_the_declared_tile(simulated: Path) -> None:
    said = run_json(f"check {simulated}")
    found = [cliff for cliff in said["cliffs"] if cliff["provider"] == MINE]
    assert found
    assert all("128x128" in json.dumps(cliff) and "wave" in json.dumps(cliff) for cliff in found), (
        found[0]
    )


def test_compare_tells_where_the_kernel_is_slower_and_report_draws_both(simulated: Path) -> None:
    words = f"--by workload --provider-a torch.mm --provider-b {MINE} --margin 2%"
    assert "slower" in run(f"compare {simulated} {simulated} {words}", code=1)
    run(f"report {simulated}")
    (page,) = simulated.glob("*.html")
    assert MINE in page.read_text(encoding="utf-8")
    run(f"check {simulated} --fail-above 1.01", code=1)
