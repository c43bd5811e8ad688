"""Links of a cluster from collectives that were measured on it."""

import json
from pathlib import Path

import pytest
from known_profile import COLLECTIVES, known_profile
from typer.testing import CliRunner

from quantbench.cli.app import app
from quantbench.latency.interconnect import cluster
from quantbench.planner.calibration import with_measured_links
from quantbench.workload import Collective, Gemm

WHERE = cluster("dgx-a100")


def all_reduce(size: int, gpus: int = 8, nodes: int = 1) -> Collective:
    return Collective("all_reduce", size, gpus, "bf16", nodes)


def test_all_reduces_of_a_node_become_its_links() -> None:
    measured = [(all_reduce(2**20), 50.0), (all_reduce(2**24), 400.0), (all_reduce(2**26), 1500.0)]
    found = with_measured_links(WHERE, measured, "run.json")
    assert found.intra_node(8).time_s(all_reduce(2**24).bus_bytes) == pytest.approx(400e-6)
    assert found.intra_node(4) == WHERE.intra_node(4)  # not measured: as before
    assert found.node_gb_per_s == WHERE.node_gb_per_s
    assert found.source.endswith("all-reduces over 8 GPUs of a node from run.json")


def test_several_runs_count_by_their_median_and_noise_does_not_make_large_messages_faster() -> None:
    measured = [(all_reduce(2**20), us) for us in (90.0, 50.0, 60.0)] + [(all_reduce(2**21), 55.0)]
    link = with_measured_links(WHERE, measured, "x").intra_node(8)
    assert link.latency_us == (60.0, 60.0)


def test_the_rate_between_nodes_is_the_best_bus_bandwidth() -> None:
    work = all_reduce(2**30, gpus=16, nodes=2)
    measured = [(work, work.bus_bytes / 40e3), (all_reduce(2**20, gpus=16, nodes=2), 9e4)]
    found = with_measured_links(WHERE, measured, "x")
    assert found.node_gb_per_s == pytest.approx(40.0)
    assert found.links == WHERE.links
    assert with_measured_links(WHERE, measured, "x", between_nodes=False) is WHERE


def test_what_says_nothing_changes_nothing() -> None:
    others = [
        (Collective("all_gather", 2**20, 8), 10.0),
        (Gemm(64, 64, 64), 5.0),
        (all_reduce(2**20), 50.0),
    ]
    assert with_measured_links(WHERE, others, "x") is WHERE


def test_a_plan_takes_the_links_of_its_profile(tmp_path: Path) -> None:
    profile = known_profile()
    file = tmp_path / "p.json"
    profile.save(file)
    typed = "plan --model bloom-176b --gpus 64 --gbs 64 --json --check --tp 8 --pp 8"
    words = [*typed.split(), "--profile", str(file), "--gpu", profile.device.name]
    topology = json.loads(CliRunner().invoke(app, words).stdout)["job"]["topology"]
    work = all_reduce(2**28, gpus=16, nodes=2)
    measured_us = COLLECTIVES["all_reduce", 2**28, 16, "bf16", 2]
    assert topology["node_gb_per_s"] == pytest.approx(work.bus_bytes / measured_us / 1e3)
    # Of 8 GPUs one size was measured, which is no curve; of 2 there are two.
    assert f"all-reduces over 2 GPUs of a node, several nodes from {file}" in topology["source"]
