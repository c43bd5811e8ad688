"""How many copies are cold."""

import pytest

from quantbench.errors import InputError
from quantbench.timing.rotation import cold_copies

MIB = 2**20


@pytest.mark.parametrize(
    ("l2_mib", "kib", "copies"),
    [(50, 10 * 1024, 21), (60, 1024, 241), (6, 64 * 1024, 2), (40, 3 * 1024, 55)],
)
def test_copies_by_hand(l2_mib: int, kib: int, copies: int) -> None:
    # 4 · L2 / bytes, rounded up, and the one whose turn it is
    assert cold_copies(l2_mib * MIB, kib * 1024) == copies


def test_errors_name_the_value() -> None:
    with pytest.raises(InputError, match="cold_copies: min_bytes = 0; expected an integer from 1"):
        cold_copies(MIB, 0)
