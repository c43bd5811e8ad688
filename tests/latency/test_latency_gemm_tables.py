"""Reading measured tables from the package where it is installed."""

from importlib.util import find_spec

import numpy as np
import pytest

from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.latency.libraries import DEFAULT_TABLES, SYSTEMS, slug_of, system_of
from tools.accuracy.tables import SHIPPED_GPUS, read_packaged

needs_package = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="the extra quantbench[tables] is not installed"
)


def test_every_system_is_of_a_known_card_and_back() -> None:
    for slug, system in SYSTEMS.items():
        assert lookup(slug).registered
        assert system_of(slug) == system_of(system) == system
        assert slug_of(system) == slug
    assert slug_of("b60") is None
    assert set(DEFAULT_TABLES) <= set(SYSTEMS.values())
    assert {system_of(slug) for slug in SHIPPED_GPUS} <= set(DEFAULT_TABLES)


@needs_package
def test_packaged_a100_table() -> None:
    table = read_packaged("a100-sxm4-80gb")
    of = table.provenance
    assert (of["framework"], of["framework_version"]) == ("SGLang", "0.5.10")
    assert len(table) == 35_742
    order = np.lexsort(table.shapes[::-1])
    assert (order == np.arange(len(table))).all()
    assert table.latency_us.min() > 1.0
    with pytest.raises(InputError, match=r"--system a1000: no .*; expected one of .*a100_sxm"):
        read_packaged("a1000")
    with pytest.raises(InputError, match=r"no fp8 in a100_sxm/gemm/sglang"):
        read_packaged("a100-sxm4-80gb", dtype="fp8")


@pytest.mark.slow
@needs_package
@pytest.mark.parametrize("system", sorted(DEFAULT_TABLES))
def test_what_was_measured_stays_below_what_the_registry_says_a_card_can(system: str) -> None:
    table, device = read_packaged(system), lookup(slug_of(system) or system)
    m, n, k = table.shapes
    tflops = 2e-6 * m * n * k / table.latency_us
    ceiling = device.ceiling("bf16")
    assert ceiling is not None
    assert 0.75 * ceiling < tflops.max() < ceiling
    moved_bytes = 2.0 * (m * n + n * k + m * k)
    gb_per_s = (moved_bytes / table.latency_us / 1e3)[moved_bytes > 4 * device.l2_bytes]
    assert 0.75 * device.memory_gb_per_s < gb_per_s.max() < device.memory_gb_per_s
