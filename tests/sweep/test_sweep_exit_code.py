"""When a sweep ends with exit code 1."""

from collections.abc import Sequence

import made_runs
import pytest

from quantbench.cli.sweep_run import _failed
from quantbench.measurement import Grade
from quantbench.store.record import Failed, Measured, Outcome, Skipped
from quantbench.timing.grade import INTERPRETED
from quantbench.workload import Gemm

TIMES_US = made_runs.measurement((10.0,) * 8)
RIGHT = Measured(TIMES_US, Grade("A"))
REJECTED = Measured(TIMES_US, Grade("rejected", ("above the peak",)))
CHECKED = Measured(TIMES_US, Grade("rejected", (INTERPRETED,)))
BROKEN = Failed("error", "RuntimeError: my kernel exploded")
WRONG = Failed("wrong_result", "relative error 0.2")


@pytest.mark.parametrize(
    ("torch", "own", "failed"),
    [
        ([RIGHT, RIGHT], [RIGHT, BROKEN], False),
        ([RIGHT, RIGHT], [BROKEN, BROKEN], True),
        ([RIGHT, RIGHT], [RIGHT, WRONG], True),
        ([RIGHT, RIGHT], [Skipped("no such dtype")], False),
        ([REJECTED], [REJECTED], True),
        ([RIGHT], [CHECKED], False),
        ([Skipped("no such dtype")], [], True),
    ],
)
def test_a_provider_that_fails_everywhere_or_errs_once_fails_the_sweep(
    torch: Sequence[Outcome], own: Sequence[Outcome], failed: bool
) -> None:
    records = []
    for provider, outcomes in (("torch.mm", torch), ("mine:Kernel", own)):
        for n, outcome in enumerate(outcomes, start=1):
            point = made_runs.record(Gemm(8, 8 * n, 8), outcome, {"n": 8 * n}, provider=provider)
            records.append(point)
    assert _failed(made_runs.run(records)) is failed
