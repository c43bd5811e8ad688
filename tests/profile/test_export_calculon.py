"""The calculon export: its curves hold measured shares, in the form that calculon's own classes
take.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_profile import GEMMS, gemm_row, known_profile, table

from quantbench.profile.exporters import export_profile
from quantbench.profile.exporters.rates import curve
from quantbench.profile.table import Table
from quantbench.workload import Collective, Gemm

# calculon is installed from source only; PyPI's package of this name is another project, without
# calculon.system.
_HAS_CALCULON = find_spec("calculon") is not None and find_spec("calculon.system") is not None


def written(folder: Path, tables: dict[str, Table] | None = None) -> dict[str, Any]:
    export_profile(known_profile(tables), "calculon", folder)
    found: dict[str, Any] = json.loads((folder / "a100-sxm4-80gb.json").read_text())
    return found


def looked_up(points: list[list[float]], size: float) -> float:
    """The share at a size, as calculon/processor.py and memory.py look it up."""
    return next(share for start, share in points if size >= start)


def test_measured_products_are_given_back_by_size(tmp_path: Path) -> None:
    matrix = written(tmp_path)["matrix"]["bfloat16"]
    assert matrix["tflops"] == 312
    by_bin: dict[int, dict[Gemm, float]] = defaultdict(dict)
    for shape, us in GEMMS.items():
        work = Gemm(*shape, layout="nt")
        # Others wait for memory half of their time or more, which calculon counts apart.
        if work.min_bytes / us / 1e3 < 0.5 * 2039:
            by_bin[math.floor(math.log(work.flops / 1e9, 4))][work] = work.flops / us / 1e6
    assert by_bin
    for rates in by_bin.values():
        for work in rates:
            share = looked_up(matrix["gflops_efficiency"], work.flops / 1e9)
            assert share * 312 == pytest.approx(median(rates.values()), rel=1e-12), work


def test_the_form_is_the_documented_one(tmp_path: Path) -> None:
    system = written(tmp_path)
    curves = [
        one["gflops_efficiency"] for part in ("matrix", "vector") for one in system[part].values()
    ]
    curves += [system[part]["MB_efficiency"] for part in ("mem1", "mem2")]
    for points in curves:
        sizes = [size for size, _ in points]
        assert sizes == sorted(set(sizes), reverse=True)
        assert sizes[-1] == 0
        assert all(0 < share <= 1 for _, share in points)
    assert system["mem1"]["GiB"] == 80
    assert system["processing_mode"] in ("roofline", "no_overlap")
    for network in system["networks"]:
        assert set(network) == {
            "bandwidth", "efficiency", "size", "latency", "ops", "must_be_filled", "processor_usage"
        }  # fmt: skip


def test_ring_volumes_are_ours(tmp_path: Path) -> None:
    """calculon/network.py: scale · size, plus offset · that / ranks."""
    ops = written(tmp_path)["networks"][0]["ops"]
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        scale, offset = ops[op]
        size = 2**20
        sent = scale * size + scale * size / 8 * offset
        assert sent == Collective(op, size, 8).bus_bytes


@pytest.mark.skipif(
    not _HAS_CALCULON, reason="needs calculon from source (github.com/calculon-ai/calculon)"
)
def test_calculon_itself_computes_with_it(tmp_path: Path) -> None:
    from calculon.system import System  # type: ignore[import-not-found]

    data = written(tmp_path)
    system = System(data)
    system.set_datatype("bfloat16")
    flops = Gemm(8192, 8192, 8192).flops
    expected = looked_up(data["matrix"]["bfloat16"]["gflops_efficiency"], flops / 1e9) * 312e12
    assert system.get_matrix_throughput(flops) == pytest.approx(expected, rel=1e-12)
    assert system.get_vector_throughput(1e9) == pytest.approx(19.5e12)
    assert system.get_mem1_throughput(2**30) == pytest.approx(
        looked_up(data["mem1"]["MB_efficiency"], 2**30 / 1e6) * 2039e9
    )
    bus_us = system.get_network(0).time("all_reduce", 2**28, 8) * 1e6
    # Of the largest all-reduce the measured 2100 µs come back, but for the latency that is added to
    # it.
    assert bus_us == pytest.approx(2100.0 + 9.5, rel=1e-9)


def test_short_products_have_an_efficiency_of_their_own(tmp_path: Path) -> None:
    """A small product is launched in vain for most of its time: a curve of large ones would hide
    that.
    """
    tables = {
        "gemm": table("gemm", [gemm_row(512, 512, 512, 6.0), gemm_row(8192, 8192, 8192, 4400.5)])
    }
    points = written(tmp_path, tables)["matrix"]["bfloat16"]["gflops_efficiency"]
    small = Gemm(512, 512, 512)
    assert looked_up(points, small.flops / 1e9) == pytest.approx(small.flops / 6.0 / 1e6 / 312)
    assert looked_up(points, 1e-6) == looked_up(points, small.flops / 1e9)
    assert looked_up(points, 1e9) == pytest.approx(
        Gemm(8192, 8192, 8192).flops / 4400.5 / 1e6 / 312
    )


def test_a_curve_descends_in_steps_and_ends_at_zero() -> None:
    found = curve(np.array([3.0, 5.0, 17.0, 18.0, 19.0]), np.array([0.1, 0.2, 0.5, 0.7, 1.4]))
    assert found == [[16.0, 0.7], [4.0, 0.2], [0.0, 0.1]]


@given(st.lists(st.tuples(st.floats(1e-3, 1e12), st.floats(1e-3, 2.0)), min_size=1))
def test_sizes_descend_strictly_to_zero_with_shares_that_calculon_asserts(
    points: list[tuple[float, float]],
) -> None:
    found = curve(*np.array(points).T)
    assert all(a[0] > b[0] for a, b in pairwise(found))
    assert found[-1][0] == 0
    assert all(0 < share <= 1 for _, share in found)
