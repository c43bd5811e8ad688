"""Which Ray is meant, and that none is waited for which is not there. Needs no ray."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantbench.cluster.ray_cluster import cluster_address, connected
from quantbench.errors import InputError, MeasurementError


@pytest.fixture
def alive() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(autouse=True)
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which `ray start` notes its address."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


def test_a_cluster_that_answers_is_taken(
    alive: str, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.write_text(f"{alive}\n")
    for wanted, address in (
        ("", alive),
        ("auto", alive),
        (alive, alive),
        ("ray://head:10001", "ray://head:10001"),
        ("local", "local"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", wanted)
        assert cluster_address() == address


def test_what_a_dead_cluster_left_behind_is_not_waited_for(recorded: Path) -> None:
    assert cluster_address() == "local"
    recorded.write_text("127.0.0.1:99999999")
    assert cluster_address() == "local"


@pytest.mark.parametrize("wanted", ["nonsense", "127.0.0.1:99999999", "auto"])
def test_a_cluster_that_does_not_answer_is_said(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", wanted)
    with pytest.raises(MeasurementError) as caught:
        cluster_address()
    assert (caught.value.operation, caught.value.value) == (
        "--on ray",
        f"RAY_ADDRESS={wanted} does not answer",
    )


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"ray is not installed") as caught, connected():
        pass
    assert caught.value.expected == "pip install -e '.[ray]' in quantbench's checkout"
