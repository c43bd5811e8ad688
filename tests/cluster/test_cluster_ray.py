"""A real Ray cluster of several nodes on this machine, its processors measured; workers killed,
nodes taken away.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT

from quantbench.store.folder import Run, read_run
from quantbench.store.record import Measured

pytest.importorskip("ray", reason="needs ray: pip install 'quantbench[ray]'")

QUICK = ("-m", "64", "-k", "64", "--precision", "20%", "--cache", "hot", "--dtype", "fp32")
PATIENCE_S = 300
# In a process of its own: Ray leaves threads, sockets and warnings behind that a test run need not
# see.
CLUSTER = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from ray.cluster_utils import Cluster

fault, nodes, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
here = os.getcwd()
os.chdir("/")  # nodes know nothing of the folder that a sweep is started in
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
others = [cluster.add_node(num_cpus=1) for _ in range(nodes - 1)]
cluster.wait_for_nodes()
os.chdir(here)
sweep = subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": cluster.address})

def records():
    return sum(path.read_bytes().count(b"\\n") for path in Path().glob("results/*/*/records.jsonl"))

def killed(word):
    import psutil
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if word in line and "--on ray" not in line and any(p.pid == os.getpid() for p in process.parents()):
            process.send_signal(signal.SIGKILL)
            print("killed", line[:80], flush=True)
            return

while sweep.poll() is None and records() < 12:
    time.sleep(0.02)
if fault == "node":
    cluster.remove_node(others[0])
elif fault == "worker":
    killed("quantbench.sweep.worker")
elif fault == "actor":
    killed("ray::DeviceActor")
elif fault == "driver":
    sweep.kill()
    sweep.wait()
    (folder,) = Path().glob("results/*/*")
    print("killed the driver after", records(), "records", flush=True)
    for attempt in range(40):  # until Ray has ended the writer of the job that is gone
        time.sleep(0.5)
        sweep = subprocess.Popen(
            [*command[:6], "--resume", str(folder)], env={**os.environ, "RAY_ADDRESS": cluster.address}
        )
        if sweep.wait() == 0:
            break
elif fault == "term":
    sweep.send_signal(signal.SIGTERM)
sys.exit(sweep.wait())
"""


def sweep_on_ray(
    folder: Path, *words: str, fault: str = "none", nodes: int = 2, device: str = "cpu"
) -> Any:
    command = [sys.executable, "-m", "quantbench", "sweep", "--on", "ray", *words]
    return subprocess.run(
        [sys.executable, "-c", CLUSTER, fault, str(nodes), *command],
        cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={**os.environ, "QUANTBENCH_DEVICE": device, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )  # fmt: skip


def run_in(folder: Path) -> Run:
    (found,) = folder.glob("results/*/*")
    return read_run(found)


def sizes(run: Run) -> list[int]:
    return sorted(r.workload.n for r in run.records if r.role == "point")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("node", "the device of part"),
        ("actor", "the device of part"),
        ("worker", "killed"),
        ("driver", "killed the driver"),
    ],
)
def test_what_is_lost_in_the_middle_is_measured_by_what_is_left(
    tmp_path: Path, fault: str, said: str
) -> None:
    # 120 points, so that the fault comes well before the end.
    words = ("--dim", "n=64:3872:32", *QUICK, "--budget", "none")
    done = sweep_on_ray(tmp_path, *words, fault=fault, nodes=3 if fault == "node" else 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout.replace("\n", " ")
    run = run_in(tmp_path)
    assert sizes(run) == list(range(64, 3873, 32))
    lost = [r for r in run.records if r.role == "point" and not isinstance(r.outcome, Measured)]
    assert len(lost) <= (fault == "worker")  # its point is tried again with --resume
    lines = [json.loads(line) for line in (run.folder / "records.jsonl").read_text().splitlines()]
    stored = Counter(
        line["key"]
        for line in lines
        if line["role"] == "point" and line["outcome"]["kind"] == "measured"
    )
    regraded = run.regraded
    assert stored.total() - len(stored) == regraded
    assert run.info.how_ended == "complete"
    assert len({r.source for r in run.records}) >= 2


def test_a_scheduler_that_ends_the_job_leaves_a_run_to_be_resumed(tmp_path: Path) -> None:
    done = sweep_on_ray(tmp_path, "--dim", "n=64:3872:32", *QUICK, "--budget", "none", fault="term")
    assert done.returncode == 130, done.stdout + done.stderr
    run = run_in(tmp_path)
    assert f"quantbench sweep --on ray --resume {run.folder.relative_to(tmp_path)}" in done.stdout
    assert "Traceback" not in done.stderr
    assert run.info.how_ended == "interrupted"
    assert 0 < len(sizes(run)) < 120


def test_no_gpu_in_the_cluster_is_said_at_once(tmp_path: Path) -> None:
    start_s = time.monotonic()
    done = sweep_on_ray(tmp_path, "--dim", "n=64", *QUICK, device="")
    assert done.returncode == 2
    assert (
        "quantbench: --on ray: the cluster has no GPU (nodes: 2); expected GPUs in it, or QUANTBENCH_DEVICE=cpu"
        in (done.stderr)
    )
    assert list(tmp_path.iterdir()) == []
    assert time.monotonic() - start_s < PATIENCE_S  # a bound on hanging, no measurement


def test_devices_and_cards_are_told_as_json(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from tests.fake_providers import Good as Gemm\n")
    words = ("--dim", "n=64:1024:64", *QUICK, "--json", "--provider", "torch.mm,own:Gemm")
    done = sweep_on_ray(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout)["runs"]
    assert told["devices"] == 2
    assert len(told["cards"]) == 2
    assert {card["label"].partition(" on ")[0] for card in told["cards"]} == {"CPU 0", "CPU 1"}
    assert Counter(row["provider"] for row in told["rows"]) == {"torch.mm": 16, "own:Gemm": 16}
