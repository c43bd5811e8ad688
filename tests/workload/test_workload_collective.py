"""Collectives that cannot be."""

import pytest

from quantbench.errors import InputError
from quantbench.workload import Collective


def test_errors() -> None:
    with pytest.raises(InputError, match=r"op = 'alltoall'; expected one of all_reduce"):
        Collective("alltoall", 1024, 8)
    with pytest.raises(InputError, match=r"num_gpus = 1; expected an integer from 2"):
        Collective("all_reduce", 1024, 1)
    with pytest.raises(InputError, match=r"message_bytes = 1023; expected a multiple of 2"):
        Collective("all_reduce", 1023, 8)
    with pytest.raises(InputError, match=r"num_nodes = 3; expected a divisor of num_gpus = 8"):
        Collective("all_reduce", 1024, 8, num_nodes=3)
