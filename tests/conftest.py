"""What all tests share: GPU tests are skipped, with a reason, where there is no GPU."""

import os
import re
from collections.abc import Generator

import pytest

_OF_DEV = re.compile("No module named '(hypothesis|jsonschema|yaml)'")

# pytest-benchmark times nothing where it sees these; pytest runs that tests start are not part of
# the parallel one.
for _name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
    os.environ.pop(_name, None)


def pytest_configure(config: pytest.Config) -> None:
    """Lets `pytest --benchmark-only` without paths time the benchmarks, and not collect all tests
    to skip them.
    """
    typed = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if config.getoption("benchmark_only", False) and not typed:
        config.args[:] = ["tests/benchmarks"]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skips a module that imports a package of the extra `dev` where that is not installed."""
    report = yield
    missing = _OF_DEV.search(str(report.longrepr)) if report.failed else None
    if missing:
        reason = f"Skipped: {missing[1]}, of the extra quantbench[dev], is not installed"
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, reason)
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
