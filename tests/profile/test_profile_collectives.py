"""Collectives that a profile is asked for: measured, between messages, beyond them, and what was
never measured.
"""

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import made_profiles as made
import numpy as np
import pytest
from typer.testing import CliRunner

from quantbench.cli.app import app
from quantbench.errors import InputError, QuantbenchError
from quantbench.latency.interconnect import Link
from quantbench.profile import Profile, Table
from quantbench.profile.table import LAYOUTS
from quantbench.workload import Collective

LINK_GB_PER_S, LATENCY_US = 200.0, 12.0


def time_us(message_bytes: float) -> float:
    return LATENCY_US + message_bytes / LINK_GB_PER_S / 1e3


def table(
    sizes: list[int], *, num_gpus: int = 8, dtype: str = "fp16", provider: str = "nccl"
) -> dict[str, list[object]]:
    times = [time_us(size) for size in sizes]
    same = {"op": "all_reduce", "num_gpus": num_gpus, "num_nodes": 1, "dtype": dtype, "provider": provider,
            "grade": "A", "origin": "measured"}  # fmt: skip
    columns: dict[str, list[object]] = {name: [value] * len(sizes) for name, value in same.items()}
    columns |= {"message_bytes": list(sizes), "latency_us": list(times)}
    return columns | {"low_us": [0.99 * us for us in times], "high_us": [1.01 * us for us in times]}


def profile(*parts: dict[str, list[object]]) -> Profile:
    joined = {
        name: [value for part in parts for value in part[name]]
        for name in LAYOUTS["collective"].columns
    }
    return replace(made.profile(), tables={"collective": Table.of("collective", joined)})


SIZES = [2**power for power in range(10, 29, 2)]


def test_a_measured_message_is_its_row() -> None:
    found = profile(table(SIZES)).collective("all_reduce", 2**20, 8)
    assert (found.source, found.outside, found.note) == ("measured", False, "")
    assert (found.latency_us, found.low_us) == pytest.approx(
        (time_us(2**20), 0.99 * time_us(2**20))
    )
    assert profile(table(SIZES)).collective("all_reduce", 1024, 8).bound == "latency"
    assert profile(table(SIZES)).collective("all_reduce", 2**28, 8).bound == "memory"


def test_between_messages_the_interval_holds_what_is_true() -> None:
    asked = np.array([[3 * 2**18], [2**21], [5 * 2**22]])
    found, true = profile(table(SIZES)).collective("all_reduce", asked, 8), time_us(asked)
    assert found.source.tolist() == [["interpolated"]] * 3
    assert (found.low_us <= true).all()
    assert (true <= found.high_us).all()
    assert np.abs(found.latency_us / true - 1).max() < 0.1


def test_beyond_the_messages_it_says_so() -> None:
    known = profile(table(SIZES))
    for size, us in ((2, time_us(1024)), (2**30, 4 * time_us(2**28))):
        found = known.collective("all_reduce", size, 8)
        assert found.latency_us == pytest.approx(us)
        assert (found.source, found.outside) == ("modelled", True)
        assert found.note == "outside the measured messages (1024 to 268435456 bytes)"
        assert log(found.high_us / found.latency_us) >= log(1.3) - 1e-9
    alone = profile(table([2**20])).collective("all_reduce", 2**20, 8)
    assert alone.source == "measured"


def test_the_planner_takes_the_same_times() -> None:
    known = profile(table(SIZES)).tables["collective"]
    bus_bytes = [Collective("all_reduce", size, 8).bus_bytes for size in SIZES]
    link = Link(tuple(map(float, bus_bytes)), tuple(known["latency_us"].tolist()))
    for size in (8, 2**10, 3 * 2**18, 2**22, 2**28, 2**30):
        found = profile(table(SIZES)).collective("all_reduce", size, 8)
        asked = Collective("all_reduce", size, 8).bus_bytes
        assert 1e6 * link.time_s(asked) == pytest.approx(found.latency_us, rel=1e-9)


def test_another_format_is_as_many_bytes_and_says_so() -> None:
    known = profile(table(SIZES), table(SIZES[:2], dtype="int8"))
    assert known.collective("all_reduce", 2**20, 8).source == "measured"  # fp16: most rows
    other = known.collective("all_reduce", 2**20, 8, dtype="bf16")
    assert other.source == "interpolated"
    assert other.latency_us == pytest.approx(time_us(2**20))
    assert log(other.high_us / other.latency_us) > log(1.15)
    assert (
        other.note
        == "bf16 was not measured: assumed to take as long as the same number of bytes of fp16"
    )


@pytest.mark.parametrize(
    ("asked", "options", "said"),
    [
        (("all_reduce", 1024, 16), {}, "over 16 GPUs was not measured; expected all_reduce over 4 GPUs, 8 GPUs"),
        (("all_reduce", 1024, 8), {"num_nodes": 2}, "over 8 GPUs on 2 nodes was not measured"),
        (("all_to_all", 1024, 8), {}, "all_to_all over 8 GPUs was not measured; expected one of all_reduce"),
        (("all_reduce", 1024, 8), {"provider": "mpi"}, "provider = 'mpi'; expected one of nccl"),
        (("reduce", 1024, 8), {}, "op = 'reduce'; expected one of all_reduce"),
        (("all_reduce", 0, 8), {}, "message_bytes = 0; expected whole numbers from 1"),
        (("all_reduce", 1024, 1), {}, "num_gpus"),
    ],
)  # fmt: skip
def test_what_was_not_measured_has_no_answer(
    asked: tuple[str, int, int], options: dict[str, Any], said: str
) -> None:
    known = profile(table(SIZES), table(SIZES, num_gpus=4))
    with pytest.raises(QuantbenchError, match=said):
        known.collective(*asked, **options)


def test_the_command_asks_for_collectives_too(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    profile(table(SIZES)).save(file)
    words = ["profile", "query", str(file), "--json", "--collective"]
    said = CliRunner().invoke(app, [*words, "all_reduce,1048576,8"]).stdout
    (answer,) = json.loads(said)["answers"]
    assert (answer["shape"], answer["source"]) == (["all_reduce", 1048576, 8], "measured")
    for wrong in ("all_reduce,8", "1,2,3", "all_reduce,x,8"):
        with pytest.raises(InputError, match=r"--collective: .*; expected op,bytes,gpus"):
            CliRunner().invoke(app, [*words, wrong], catch_exceptions=False)
