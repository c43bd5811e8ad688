"""What all tests share: GPU tests are skipped, with a reason, where there is no GPU."""

import os

import pytest

# Every Python process may have another module of this name, so pytest cannot import it for its doctests.
collect_ignore = ["rehearsal/sitecustomize.py"]

# pytest-benchmark times nothing where it sees these; pytest runs that tests start are not part of the parallel one.
for _name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
    os.environ.pop(_name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
