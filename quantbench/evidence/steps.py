"""What each step measures: sweeps as a user would type them, most valuable first, with a share of the step's time.

On a CPU the same steps run over small sizes, so that no GPU minute is spent on finding a mistake in them.
"""

from __future__ import annotations

from dataclasses import dataclass

# Ten minutes a step, less the start of the processes and the packing.
STEP_SECONDS = {"cuda": 530.0, "cpu": 60.0}


@dataclass(frozen=True)
class PlannedSweep:
    """One sweep. name: of its folder in the state. words: arguments of `quantbench sweep`. share: of the step's time.
    cpu_words: the rehearsal's sizes."""

    name: str
    words: tuple[str, ...]
    cpu_words: tuple[str, ...]
    share: float


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_BOTH = "torch,triton"

# Step 1: our kernels against the libraries' (figures of the kernels' page), then the fused-softmax rule.
_KERNELS = (
    PlannedSweep(
        "gemm-8192",
        _words(
            "--dim n=8192 -m 8192 -k 8192 --layout nt --provider "
            "torch,triton.data_parallel,triton.persistent,triton.stream_k,triton.split_k"
        ),
        _words("--dim n=128 -m 128 -k 128 --layout nt --provider torch"),
        0.06,
    ),
    PlannedSweep(
        "kernels-hidden",
        _words(f"--dim hidden=1024:8192:512 --provider {_BOTH},triton.persistent"),
        _words("--dim hidden=128:256:128 --seq 64 --provider torch"),
        0.30,
    ),
    PlannedSweep(
        "kernels-softmax",
        _words(f"--dim seq=512,1024,2048,2056,4096,8192 --heads 32 --ops softmax --direction both --provider {_BOTH}"),
        _words("--dim seq=64,128 --heads 4 --ops softmax --direction both --provider torch"),
        0.12,
    ),
    PlannedSweep(
        "kernels-attention",
        _words(
            f"--dim seq=1024,2048,4096,8192 --hidden 4096 --heads 32 --ops attention --direction both "
            f"--provider {_BOTH}"
        ),
        _words("--dim seq=64,128 --hidden 256 --heads 4 --ops attention --direction both --provider torch"),
        0.16,
    ),
    PlannedSweep(
        # heads · mbs from 4 to 12: every third is divisible by 4, where Megatron's fused kernel is available.
        "fused-rule",
        _words(f"--dim heads=4,5,6,7,8,12 --hidden 8400 --skip-impossible --seq 2048 --ops softmax --provider {_BOTH}"),
        _words("--dim heads=2,4 --hidden 256 --seq 64 --ops softmax --provider torch"),
        0.06,
    ),
)

# Step 2: the axes.
_AXES = (
    PlannedSweep(
        "hidden",
        _words("--dim hidden=1024:16384:64@edges --direction both"),
        _words("--dim hidden=128:256:64 --seq 64 --direction both"),
        0.34,
    ),
    *(
        PlannedSweep(
            f"heads-{hidden}",
            _words(f"--dim heads={heads} --hidden {hidden} --skip-impossible --ops scores,softmax,context,attention"),
            _words("--dim heads=2,4 --hidden 256 --seq 64 --ops scores,softmax,context,attention"),
            0.07,
        )
        for hidden, heads in (
            (12288, "48,64,96,128"),
            (13824, "64,72,96,108,128"),
            (14336, "56,64,112,128"),
            (14400, "60,72,80,96,100,120"),
        )
    ),
    PlannedSweep("mbs", _words("--dim mbs=1:8:1 --hidden 8192 --heads 64"), _words("--dim mbs=1,2 --seq 64"), 0.08),
    PlannedSweep("tp", _words("--dim tp=1,2,4,8 --hidden 14336 --heads 112"), _words("--dim tp=1,2 --seq 64"), 0.04),
    PlannedSweep(
        "vocab",
        _words("--dim vocab=50176:50432:8,128000:128256:8,250752:251008:8 --hidden 4096"),
        _words("--dim vocab=256:320:8 --seq 64"),
        0.10,
    ),
    PlannedSweep(
        "n-edges", _words("--dim n=3072:9216:8@edges -m 4096 -k 4096 --layout nt"), _words("--dim n=64:96:8"), 0.16
    ),
)

# Step 3 is a list of shapes, made when it runs (see `random_shapes`).
STEPS: dict[int, tuple[PlannedSweep, ...]] = {1: _KERNELS, 2: _AXES, 3: ()}

#: name of step 3's sweep, and its number of shapes by kind of device
RANDOM_SWEEP = "random-shapes"
RANDOM_SHAPES = {"cuda": 1500, "cpu": 12}
_SHAPE_RANGES = {
    "cuda": {"m": (1, 16384), "n": (64, 16384), "k": (64, 16384)},
    "cpu": {"m": (1, 256), "n": (16, 256), "k": (16, 256)},
}


def random_shapes(kind: str, seed: int = 0) -> list[tuple[int, int, int]]:
    """(m, n, k), spread evenly over the logarithm of each range; n and k are multiples of 8, three in four of 64."""
    import numpy as np

    random = np.random.default_rng(seed)
    shapes = []
    for _ in range(RANDOM_SHAPES[kind]):
        sizes = []
        for name in ("m", "n", "k"):
            low, high = _SHAPE_RANGES[kind][name]
            value = int(np.exp(random.uniform(np.log(low), np.log(high))))
            step = 1 if name == "m" else 64 if random.random() < 0.75 else 8
            sizes.append(max(step, round(value / step) * step))
        shapes.append((sizes[0], sizes[1], sizes[2]))
    return shapes
