"""Points without a kernel's name are told, with the reason."""

import pytest
from made_devices import CPU
from made_runs import record, run

from quantbench.cli.sweep_print import naming_lines
from quantbench.launch import Launch
from quantbench.store.record import Record
from quantbench.workload import Gemm


def point(*, named: bool, identify_s: float | None) -> Record:
    phases_s = {"measuring": 0.1} | ({} if identify_s is None else {"identify": identify_s})
    launch = Launch("nvjet") if named else None
    return record(Gemm(64, 64, 64), (1.0, 1.0), {"n": 64}, launch=launch, phases_s=phases_s)


def lines(*records: Record, way: str = "apart", **changes: object) -> list[str]:
    given: dict[str, object] = {
        "origin": "measured",
        "environment": {"QUANTBENCH_KERNEL_NAMES": way},
    }
    return list(naming_lines(run(records, **given | changes)))


def test_missing_names_are_counted_and_points_that_were_not_asked_apart() -> None:
    records = point(named=True, identify_s=0.1), *[point(named=False, identify_s=0.4)] * 2
    (said,) = lines(*records)
    assert said.startswith("2 of 3 points have no kernel name")
    (said,) = lines(point(named=True, identify_s=0.2), point(named=False, identify_s=None))
    assert "1 were not asked" in said
    assert lines(point(named=True, identify_s=None)) == []


@pytest.mark.parametrize("changes", [{"way": "off"}, {"origin": "simulated"}, {"device": CPU}])
def test_nothing_is_said_where_names_are_not_to_be_expected(changes: dict[str, object]) -> None:
    assert lines(point(named=False, identify_s=0.1), **changes) == []  # type: ignore[arg-type]
