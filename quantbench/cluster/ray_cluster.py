"""Connects to a Ray cluster with `connected`, and counts the devices of its nodes."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from quantbench.errors import InputError, MeasurementError, UnsupportedError

WHO = "--on ray"  # name of the operation in error messages
_VARIABLE = "QUANTBENCH_DEVICE"
_PROBE_S = 3.0  # time limit for the probe of a cluster's address


def device_kind() -> str:
    """Returns Ray's resource name for the devices to measure: `CPU` or `GPU`."""
    return "CPU" if os.environ.get(_VARIABLE) == "cpu" else "GPU"


def present(nodes: Sequence[dict[str, Any]]) -> int:
    """Returns the number of devices in all live nodes.

    If CPUs are measured, each node has one device, because its cores share caches.

    nodes: descriptions of the nodes, as ray.nodes() returns them.
    """
    kind = device_kind()
    total = 0
    for node in nodes:
        if node["Alive"]:
            count = int(node["Resources"].get(kind, 0))
            total += min(count, 1) if kind == "CPU" else count
    return total


def device_count(nodes: Sequence[dict[str, Any]], free: dict[str, float]) -> int:
    """Returns the number of free devices to measure: GPUs, or at most one CPU per node.

    nodes: descriptions of the nodes, as ray.nodes() returns them.
    free: number of free resources by name, as ray.available_resources() returns it.

    Raises UnsupportedError if the cluster has no device of this kind, or if all devices are in use.
    """
    kind = device_kind()
    there = present(nodes)
    count = min(there, int(free.get(kind, 0)))
    if count:
        return count
    found = f"every {kind} of the cluster is in use"
    if not there:
        found = f"the cluster has no {kind} (nodes: {len(nodes)})"
    raise UnsupportedError(WHO, found, f"{kind}s in it, or {_VARIABLE}=cpu to measure processors")


def cluster_address() -> str:
    """Returns the address of the Ray cluster to connect to.

    This is RAY_ADDRESS if it is set and not `auto`. Otherwise, it is the address of the cluster
    that `ray start` last started on this machine, or `local` for a new cluster. An address with
    host and port is probed first, because Ray waits minutes for a cluster that has ended.

    Raises MeasurementError if RAY_ADDRESS is set and its cluster does not answer.
    """
    wanted = os.environ.get("RAY_ADDRESS", "")
    address = wanted
    if wanted in ("", "auto"):
        recorded = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
        address = recorded.read_text(encoding="utf-8").strip() if recorded.is_file() else ""
    if "://" in address or address == "local":
        return address
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError, OverflowError):
        socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
        return address
    if wanted:
        answer = f"RAY_ADDRESS={wanted} does not answer"
        raise MeasurementError(WHO, answer, "a Ray cluster that runs")
    return "local"


@contextmanager
def connected(modules: Sequence[Path] = ()) -> Iterator[Any]:
    """Yields the module ray while it is connected to the cluster at `cluster_address`.

    modules: files and folders of Python modules that Ray copies to every node.

    Raises InputError if ray is not installed, or if QUANTBENCH_DEVICE is neither empty, `cpu` nor
    `cuda`. Raises MeasurementError if the cluster does not answer.
    """
    wish = os.environ.get(_VARIABLE, "")
    if wish not in ("", "cpu", "cuda"):
        expected = "every GPU of the cluster (unset), or cpu"
        raise InputError(WHO, f"{_VARIABLE}={wish}", expected)
    try:
        import ray
    except ImportError:
        expected = "pip install -e '.[ray]' in quantbench's checkout"
        raise InputError(WHO, "ray is not installed", expected) from None
    address = cluster_address()
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level="ERROR",
            include_dashboard=False,
            runtime_env={"py_modules": list(map(str, modules))} if modules else None,
        )
        yield ray
    except ConnectionError as error:
        expected = "a Ray cluster that answers"
        raise MeasurementError(WHO, str(error).splitlines()[0], expected) from None
    finally:
        ray.shutdown()
