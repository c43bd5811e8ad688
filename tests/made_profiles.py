"""Profiles made of literals and of the shipped A100 model; what they hold says that it is
simulated.
"""

from functools import cache

import made_runs
import numpy as np

from quantbench.device import lookup
from quantbench.latency.gemm.model import GemmModel
from quantbench.launch import Launch, Tile
from quantbench.profile import Profile
from quantbench.store.folder import Run
from quantbench.store.record import Record
from quantbench.workload import Attention, Collective, Gemm, Softmax

A100 = lookup("a100-sxm4-80gb")
#: what is the same in all rows of an imported table of products
IMPORTED = {
    "dtype": "bf16",
    "layout": "nt",
    "provider": "sglang",
    "kernel": "",
    "grade": "C",
    "origin": "imported",
}
HIDDEN = tuple(range(2048, 4097, 128))
M = (1024, 1536, 2048, 3072, 4096)


def model() -> GemmModel:
    """The shipped A100 model as a profile without a fit carries it."""
    return GemmModel.best(A100)


def true_us(gemm: Gemm) -> float:
    """What the made A100 takes: the shipped model's time, 4 % more with each factor of e that n is
    wider.
    """
    us = model().predict(gemm.m, gemm.n, gemm.k, batch=gemm.batch, layout=gemm.layout).latency_us
    return float(us * (gemm.n / 1024) ** 0.04)


def gemm_records(layout: str = "nt", dtype: str = "bf16") -> list[Record]:
    """A sweep over hidden at 2048 rows (n = 3·hidden), and one over m at n = k = 4096."""
    launch = Launch("made_128x256", tile=Tile(128, 256))
    gemms = [
        (Gemm(2048, 3 * h, h, layout=layout, dtype=dtype), {"hidden": h}, "qkv") for h in HIDDEN
    ]
    gemms += [(Gemm(m, 4096, 4096, layout=layout, dtype=dtype), {"m": m}, "gemm") for m in M]
    found = []
    for gemm, axes, op in gemms:
        times = made_runs.samples(true_us(gemm), noise=0.002, count=9, seed=gemm.n + gemm.m)
        found.append(
            made_runs.record(gemm, times, axes, op=op, launch=launch, provider="torch.linear")
        )
    return found


def other_records() -> list[Record]:
    """Softmax, attention and collectives."""
    found = []
    for seq in (512, 1024, 2048):
        timed = (
            (Softmax(64, seq, seq), seq**2 / 8e3, "triton.fused"),
            (Attention(1, 32, seq, seq, 128), 5 + seq**2 / 1.4e4, "torch.flash"),
        )
        for work, us, who in timed:
            times = made_runs.samples(us, noise=0.01, count=7, seed=seq)
            found.append(made_runs.record(work, times, {"seq": seq}, op=work.kind, provider=who))
        work = Collective("all_reduce", seq * 1024, 8)
        times = (20.0 + seq / 100,)
        found.append(made_runs.record(work, times, {"seq": seq}, op=work.op, provider="nccl"))
    return found


def run(records: list[Record], run_id: str = "run", **changes: object) -> Run:
    return made_runs.run(records, run_id, **{"device": A100, **changes})


@cache
def profile() -> Profile:
    """All of it in one profile, with the shipped models."""
    return Profile.from_runs([run(gemm_records() + other_records())], fit=False)


def rows_beyond(count: int) -> list[Record]:
    """More rows than stand in a JSON file: products of many m at the model's own times."""
    m = np.arange(1, count + 1)
    times_us = 1.1 * model().predict(m, 1024, 1024, layout="nt").latency_us
    return [
        made_runs.record(
            Gemm(int(a), 1024, 1024, layout="nt"),
            (float(us),),
            {"m": int(a)},
            provider="torch.linear",
        )
        for a, us in zip(m, times_us, strict=True)
    ]
