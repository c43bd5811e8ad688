"""Lists the parts of the three commands that measure a GPU (docs/evidence.md), in the order in which they run.

Entry points: `COMMANDS`, used by `run` and `write`; `random_shapes` and `write_shapes`, used by `run` and `cost`.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Part:
    """One process of a command.

    name: its key in state.json. seconds: its time, start included, when every part of the command runs; a part also
    takes what the parts before it left over. words: arguments of `python -m`; {folder} stands for the command's folder.
    """

    name: str
    seconds: float
    words: tuple[str, ...]

    @property
    def is_sweep(self) -> bool:
        """Returns whether the part is a `quantbench sweep`, which a later start resumes."""
        return self.words[:2] == ("quantbench", "sweep")


def _sweep(name: str, seconds: float, words: str) -> Part:
    return Part(name, seconds, ("quantbench", "sweep", *words.split()))


def _table(name: str, seconds: float, module: str = "", *more: str) -> Part:
    module = module or name.replace("-", "_")
    return Part(name, seconds, (f"tools.evidence.{module}", f"{{folder}}/{name}.json", *more))


def _tests(name: str, seconds: float, marked: str, *more: str) -> Part:
    folders = ("tests/analysis", "tests/device", "tests/kernels", "tests/providers", "tests/timing")
    words = ("pytest", *folders, "-v", "--benchmark-skip", "-p", "no:cacheprovider", "-W", "default", "-m", marked)
    return Part(name, seconds, (*words, *more))


_SCHEDULES = "torch,triton.data_parallel,triton.persistent,triton.stream_k,triton.split_k"
_LARGE = "--dim n=8192 -m 8192 -k 8192 --layout nt"
_BOTH = "--provider torch,triton"
_EDGES = "-m 4096 -k 4096 --layout nt"
#: names of the sweeps whose kernels are compared with the libraries', and of the sweep that predictions are tested on
KERNEL_SWEEPS = ("gemm-8192", "gemm-8192-fp8", "attention", "softmax", "fused-rule", "n-fp8")
RANDOM_SWEEP = "random-shapes"

#: parts by command; their seconds add up to the command's limit
COMMANDS: dict[str, tuple[Part, ...]] = {
    "a": (
        _table("capture", 45),
        _tests("tests-correctness", 165, "gpu and not gpu_timing"),
        # The agreement of fixture and sweep takes two minutes of its own: `pytest -m gpu_timing`.
        _tests("tests-timing", 45, "gpu_timing", "-k", "not fixture_and_sweep"),
        _table("timer-truth", 75),
    ),
    "b": (
        _table("copy-bandwidth", 20),
        _sweep("gemm-8192", 35, f"{_LARGE} --provider {_SCHEDULES}"),
        _sweep("gemm-8192-fp8", 35, f"{_LARGE} --dtype fp8 --provider {_SCHEDULES}"),
        _sweep(
            "attention",
            65,
            f"--dim seq=1024,2048,4096,8192 --hidden 4096 --heads 32 --ops attention --direction both {_BOTH}",
        ),
        _sweep(
            "softmax",
            50,
            f"--dim seq=512,1024,2048,2056,4096,8192 --heads 32 --ops softmax --direction both {_BOTH}",
        ),
        _sweep("hidden", 170, "--dim hidden=4096:8192:64 --ops qkv,proj,mlp_up,mlp_down"),
        _table("timer-nvbench", 100, "timer_truth", "--nvbench"),
        # heads · mbs from 4 to 12: every third is divisible by 4, where Megatron's fused kernel is available.
        _sweep(
            "fused-rule",
            45,
            f"--dim heads=4,5,6,7,8,12 --hidden 8400 --seq 2048 --ops softmax {_BOTH}",
        ),
    ),
    "c": (
        _sweep(RANDOM_SWEEP, 180, "--shapes {folder}/random-shapes.csv --layout nt"),
        _sweep("n-edges", 100, f"--dim n=3072:5120:8 {_EDGES}"),
        _sweep(
            "heads",
            70,
            "--dim heads=48,60,64,72,80,96,100,108,112,120,128 --dim hidden=12288,13824,14336,14400 "
            "--ops scores,softmax,context,attention --provider torch.mm,torch.eager,torch.flash",
        ),
        _table("cost", 75),
        _sweep("n-fp8", 45, f"--dim n=4096:8192:256 {_EDGES} --dtype fp8 --provider torch,triton"),
    ),
}

#: what `--on-cpu` runs in place of each sweep: two small products; it leaves the other parts out
ON_CPU = ("--dim", "n=64,128", "-m", "64", "-k", "64", "--dtype", "fp32", "--precision", "20%")

RANDOM_SHAPES = 500
_RANGES = {"m": (1, 16384), "n": (64, 16384), "k": (64, 16384)}


def random_shapes(seed: int = 0) -> list[tuple[int, int, int]]:
    """Draws RANDOM_SHAPES times (m, n, k), log-uniform; n and k are multiples of 8, three in four of 64."""
    random = np.random.default_rng(seed)
    shapes = []
    for _ in range(RANDOM_SHAPES):
        sizes = []
        for name, (low, high) in _RANGES.items():
            value = int(np.exp(random.uniform(np.log(low), np.log(high))))
            step = 1 if name == "m" else 64 if random.random() < 0.75 else 8
            sizes.append(max(step, round(value / step) * step))
        shapes.append((sizes[0], sizes[1], sizes[2]))
    return shapes


def write_shapes(folder: Path) -> None:
    """Writes random GEMMs as `random-shapes.csv`, which `quantbench sweep --shapes` reads."""
    with (folder / "random-shapes.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("m", "n", "k"), *random_shapes()])
