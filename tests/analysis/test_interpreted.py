"""Times of Triton's interpreter are in the records, and in no result that is drawn from them."""

from pathlib import Path

import made_runs
import pytest
from commands import run, run_json
from made_devices import A100
from sweep_doubles import HELD, Bench, measured

from quantbench.sweep.axes import parse_axis
from quantbench.sweep.plan import build_plan
from quantbench.timing.options import TimingOptions

LEFT_OUT = "17 times left out: it ran in triton's interpreter"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 17 products by torch and by a kernel of ours, measured while TRITON_INTERPRET was
    set.
    """
    axis = parse_axis("n=1024:2048:64")
    plan = build_plan((axis,), HELD, ("torch.mm", "triton.data_parallel"), TimingOptions(), A100)
    bench = Bench(plan, lambda request: measured(100.0 if request.provider == "torch.mm" else 1e6))
    bench.sweep(interpreter=True).run()
    return made_runs.write(tmp_path, made_runs.run(bench.records))


def test_check_counts_none_of_them(folder: Path) -> None:
    said = run(f"check {folder}").splitlines()
    assert any(line.startswith("17 measured points, 1 curve") for line in said)
    assert LEFT_OUT in said
    found = run_json(f"check {folder}")
    assert (found["num_points"], found["left_out"]) == (17, [LEFT_OUT])


def test_a_profile_holds_none_of_them(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "profile.json"
    said = run(f"profile export {folder} -o {target} --no-fit")
    assert "rows: 17 of gemm" in said
    assert LEFT_OUT in said
    assert "triton" not in target.read_text()
