"""Which Ray is meant, and that none is waited for which is not there. Needs no ray."""

from __future__ import annotations

import socket
import sys

import pytest

from quantbench.cluster.ray_pool import RayPool, answers, cluster_address, introduction_from_text, reply_from_text
from quantbench.errors import InputError, MeasurementError
from quantbench.sweep.child import WorkerLostError


def nobody(address: str) -> bool:
    return False


def anybody(address: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("wanted", "recorded", "probe", "found"),
    [
        ("", "", nobody, "local"),
        ("", "10.0.0.1:6379", nobody, "local"),  # what a dead cluster left behind
        ("", "10.0.0.1:6379", anybody, "10.0.0.1:6379"),
        ("auto", "10.0.0.1:6379", anybody, "10.0.0.1:6379"),
        ("node1:6379", "", anybody, "node1:6379"),
        ("node1:6379", "10.0.0.1:6379", anybody, "node1:6379"),
        ("ray://head:10001", "", nobody, "ray://head:10001"),
        ("local", "10.0.0.1:6379", nobody, "local"),
    ],
)
def test_where_ray_is_looked_for(wanted: str, recorded: str, probe: object, found: str) -> None:
    assert cluster_address(wanted, recorded, probe) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("node1:6379", "--on ray: RAY_ADDRESS=node1:6379 does not answer; expected a Ray cluster that runs"),
        ("auto", "--on ray: RAY_ADDRESS=auto, and no Ray runs here; expected `ray start` before it"),
    ],
)
def test_a_cluster_that_does_not_answer_is_said(wanted: str, message: str) -> None:
    with pytest.raises(MeasurementError) as caught:
        cluster_address(wanted, "10.0.0.1:6379", nobody)
    assert str(caught.value) == message


def test_a_port_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert answers(f"127.0.0.1:{port}")
    assert not answers(f"127.0.0.1:{port}")
    assert not answers("nonsense")
    assert not answers("127.0.0.1:99999999")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"^--on ray: ray is not installed; expected pip install 'quantbench\[ray\]'"):
        RayPool()


def test_what_an_agent_says_is_understood() -> None:
    with pytest.raises(WorkerLostError, match="killed by SIGSEGV"):
        reply_from_text('{"lost": ["crash", "killed by SIGSEGV"]}')
    with pytest.raises(MeasurementError, match="the GPU fell off the bus"):
        reply_from_text('{"refused": "the GPU fell off the bus"}')
    with pytest.raises(MeasurementError, match="no driver"):
        introduction_from_text('{"refused": "no driver"}')
    reply = reply_from_text('{"reply": {"measurement": null}}')
    assert reply.failed is not None
    assert reply.failed[0] == "error"
