"""Which Ray is meant, and that none is waited for which is not there. Needs no ray."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import pytest

from quantbench.cluster.ray_sweep import cluster_address, connected
from quantbench.errors import InputError, MeasurementError


@pytest.fixture
def alive() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_cluster_that_answers_is_taken(alive: str) -> None:
    assert cluster_address("", alive) == cluster_address("auto", alive) == alive
    assert cluster_address(alive, "") == alive
    assert cluster_address("ray://head:10001", "") == "ray://head:10001"
    assert cluster_address("local", alive) == "local"


def test_what_a_dead_cluster_left_behind_is_not_waited_for() -> None:
    assert cluster_address("", "") == cluster_address("", "127.0.0.1:99999999") == "local"


@pytest.mark.parametrize("wanted", ["nonsense", "127.0.0.1:99999999", "auto"])
def test_a_cluster_that_does_not_answer_is_said(wanted: str) -> None:
    with pytest.raises(MeasurementError) as caught:
        cluster_address(wanted, "")
    assert (caught.value.operation, caught.value.value) == (
        "--on ray",
        f"RAY_ADDRESS={wanted} does not answer",
    )


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"ray is not installed") as caught, connected():
        pass
    assert caught.value.expected == "pip install '.[ray]' in quantbench's checkout"
