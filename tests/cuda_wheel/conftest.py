"""The fixture `h100`, a CUDA device of fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes `cuda` an H100 of fake tensors during a test; gives the launches of kernels."""
    import fake_cuda

    with fake_cuda.h100(monkeypatch) as launches:
        yield launches
