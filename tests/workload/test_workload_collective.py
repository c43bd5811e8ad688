"""Collectives: the bytes each GPU must send, and what cannot be."""

from dataclasses import dataclass

import pytest

from quantbench.errors import InputError
from quantbench.store.typed import decode, encode
from quantbench.workload import Collective, Workload


@dataclass(frozen=True)
class Stored:
    workload: Workload


@pytest.mark.parametrize(
    ("op", "bus_bytes"),
    # nccl-tests, doc/PERFORMANCE.md: factors 2(n-1)/n for all_reduce, (n-1)/n for the three, 1 for
    # the others
    [
        ("all_reduce", 1792),
        ("all_gather", 896),
        ("reduce_scatter", 896),
        ("all_to_all", 896),
        ("broadcast", 1024),
    ],
)
def test_bus_bytes(op: str, bus_bytes: int) -> None:
    assert Collective(op, 1024, 8).bus_bytes == bus_bytes


def test_json_round_trip() -> None:
    work = Collective("all_reduce", 4096, 16, dtype="fp16", num_nodes=2)
    assert decode(Stored, encode(Stored(work))) == Stored(work)
    assert str(work) == "all_reduce 4096 B over 16 GPUs on 2 nodes fp16"


def test_errors() -> None:
    with pytest.raises(InputError, match=r"op = 'alltoall'; expected one of all_reduce"):
        Collective("alltoall", 1024, 8)
    with pytest.raises(InputError, match=r"num_gpus = 1; expected an integer from 2"):
        Collective("all_reduce", 1024, 1)
    with pytest.raises(InputError, match=r"message_bytes = 1023; expected a multiple of 2"):
        Collective("all_reduce", 1023, 8)
    with pytest.raises(InputError, match=r"num_nodes = 3; expected a divisor of num_gpus = 8"):
        Collective("all_reduce", 1024, 8, num_nodes=3)
