"""A simulated GPU: times of matrix products that follow known tiles and waves, with known noise.

A test fixture and nothing else. What it makes is marked: records have origin `simulated`, runs are
called `simulated-…`, and every printout of a command says so. It uses none of the arithmetic of
`quantbench.quantization`, so that an error there cannot cancel out.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from pathlib import Path

import made_runs
import numpy as np

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.launch import Launch, Tile
from quantbench.measurement import Grade, Measurement
from quantbench.store.folder import Run
from quantbench.store.record import Measured, Record
from quantbench.sweep.messages import Hello, Reply, Request
from quantbench.timing.options import TimingOptions
from quantbench.workload import Gemm

PROVIDER = "simulated"
RUN_ID = "simulated-run"
STATE = DeviceState(sm_clock_mhz=1400.0)


@dataclass(frozen=True)
class SimulatedGpu:
    """Times products of one tile (or of the tile that `choose` picks for a product).

    tile_ns_per_k: time of one tile on an SM of its own, per element of the reduction. fluid_share:
        share of the wave
    time that follows the blocks themselves, not whole waves (0: hard waves). bytes_us: µs per byte
    moved, added to the rest. misaligned: factor on products with a stored row that is no multiple
    of 16 bytes.
    """

    sm_count: int
    tile: Tile
    blocks_per_sm: int = 1
    tile_ns_per_k: float = 20.0
    overhead_us: float = 3.0
    fluid_share: float = 0.0
    us_per_byte: float = 0.0
    misaligned: float = 1.0
    choose: Callable[[Gemm], Tile] | None = field(default=None, compare=False)

    @property
    def resident(self) -> int:
        """Blocks that run at a time."""
        return self.sm_count * self.blocks_per_sm

    def tile_of(self, gemm: Gemm) -> Tile:
        return self.tile if self.choose is None else self.choose(gemm)

    def blocks(self, gemm: Gemm) -> int:
        tile = self.tile_of(gemm)
        return gemm.batch * ceil(gemm.m / tile.block_m) * ceil(gemm.n / tile.block_n) * tile.split_k

    def waves(self, gemm: Gemm) -> int:
        return ceil(self.blocks(gemm) / self.resident)

    def time_us(self, gemm: Gemm, *, like: Gemm | None = None) -> float:
        """Noise-free time. like: with the tile, the waves and the blocks of this product instead of
        its own, which is what `gemm` would take if there were no step between the two."""
        shape = gemm if like is None else like
        tile = self.tile_of(shape)
        waves = (1 - self.fluid_share) * self.waves(shape) + self.fluid_share * self.blocks(
            shape
        ) / self.resident
        # Blocks that share an SM take turns, so a wave of two blocks per SM takes twice as long as
        # one of one.
        area = tile.block_m * tile.block_n / (self.tile.block_m * self.tile.block_n)
        wave_us = self.tile_ns_per_k * 1e-3 * gemm.k / tile.split_k * area * self.blocks_per_sm
        total_us = self.overhead_us + waves * wave_us + gemm.min_bytes * self.us_per_byte
        rows = (
            shape.k if shape.layout[0] == "n" else shape.m,
            shape.n if shape.layout[1] == "n" else shape.k,
            shape.n,
        )
        return total_us * (self.misaligned if any(2 * row % 16 for row in rows) else 1.0)

    def spec(self) -> DeviceSpec:
        """As a device that a run can name."""
        peak = (
            2
            * self.tile.block_m
            * self.tile.block_n
            / self.tile_ns_per_k
            * self.sm_count
            / 1e3
            * 1.3
        )
        return DeviceSpec(
            f"simulated-{self.sm_count}sm", "cuda", self.sm_count, 1400, 40 * 2**20, 164 * 2**10, 80 * 2**30, 20_000,
            {"bf16": peak}, (8, 0), source={"sm_count": "simulated", "peak_tflops": "simulated"}, registered=False,
        )  # fmt: skip

    def launch(self, gemm: Gemm) -> Launch:
        """The launch as a profiler would report it."""
        tile = self.tile_of(gemm)
        return Launch(f"simulated_{tile}", (self.blocks(gemm), 1, 1), (256, 1, 1), blocks_per_sm=self.blocks_per_sm,
                      tile=tile)  # fmt: skip


def noisy_us(
    time_us: float, noise: float, samples: int, rng: np.random.Generator
) -> tuple[float, ...]:
    """Samples with log-normal noise of relative standard deviation `noise`."""
    return tuple(float(t) for t in time_us * np.exp(rng.normal(0.0, noise, samples)))


def measurement(samples_us: Sequence[float], clock_mhz: float = 1400.0) -> Measurement:
    clocks_mhz = (clock_mhz,) * len(samples_us)
    return made_runs.measurement(
        samples_us, clocks_mhz=clocks_mhz, state_before=STATE, state_after=STATE
    )


def records_of(
    gpu: SimulatedGpu,
    points: Iterable[tuple[dict[str, int], Gemm]],
    *,
    noise: float,
    samples: int = 10,
    seed: int,
    launches: bool = False,
    op: str = "gemm",
    provider: str = PROVIDER,
) -> list[Record]:
    """One record per point. points: the place on the axes, and the product there."""
    rng = np.random.default_rng(seed)
    return [
        made_runs.record(
            gemm,
            Measured(measurement(noisy_us(gpu.time_us(gemm), noise, samples, rng)), Grade("A")),
            axes,
            op=op,
            provider=provider,
            launch=gpu.launch(gemm) if launches else None,
        )
        for axes, gemm in points
    ]


def along(axis: str, values: Iterable[int], held: Gemm) -> list[tuple[dict[str, int], Gemm]]:
    """Points along one axis: m, n, k or batch; or `hidden`, where n and k are the axis value
    together.
    """
    names = ("n", "k") if axis == "hidden" else (axis,)
    return [({axis: value}, replace(held, **dict.fromkeys(names, value))) for value in values]


def run_of(gpu: SimulatedGpu, records: Sequence[Record], run_id: str = RUN_ID) -> Run:
    return made_runs.run(records, run_id, device=gpu.spec(), source="tests/simulator.py")


def write_simulated(
    results: Path, gpu: SimulatedGpu, records: Sequence[Record], run_id: str = RUN_ID
) -> Path:
    """A run's folder with these records in it."""
    return made_runs.write(results, run_of(gpu, records, run_id))


#: SM counts of real cards, and tiles that libraries use
_SM_COUNTS = (46, 60, 72, 78, 80, 84, 108, 114, 128, 132, 142, 144, 148, 160)
_TILES = (
    (256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (256, 64), (64, 256), (192, 128), (128, 192),
    (96, 128),
)  # fmt: skip
# A sweep shows a staircase when its plateaus have this many points, in the mean.
_FEWEST_ON_A_PLATEAU = 3


@dataclass(frozen=True)
class Case:
    """A random device and a sweep of it along one axis that resolves its plateaus and sees at least
    three waves.
    """

    gpu: SimulatedGpu
    axis: str
    points: list[tuple[dict[str, int], Gemm]]

    @property
    def log_steps(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The true jump of the log time behind each point but the last (points − 1,): what the
        waves there add.
        """
        gemms = [gemm for _, gemm in self.points]
        return np.array(
            [np.log(self.gpu.time_us(b) / self.gpu.time_us(b, like=a)) for a, b in pairwise(gemms)]
        )


def random_case(seed: int) -> Case:
    """Tile, SMs, blocks per SM, overhead, softness of waves, memory, axis, range and held sizes
    drawn at random.
    """
    rng = np.random.default_rng(seed)
    while True:
        block_m, block_n = _TILES[rng.integers(len(_TILES))]
        gpu = SimulatedGpu(
            int(rng.choice(_SM_COUNTS)), Tile(block_m, block_n), int(rng.choice([1, 1, 2])),
            tile_ns_per_k=float(rng.choice([10, 20, 40])), overhead_us=float(rng.choice([2, 5, 10])),
            fluid_share=float(rng.choice([0, 0, 0.1, 0.25])), us_per_byte=float(rng.choice([0, 0, 5e-7])),
        )  # fmt: skip
        axis, step = str(rng.choice(["n", "m", "hidden"])), int(rng.choice([16, 32, 64, 128]))
        start = int(rng.choice([256, 512, 1024, 2048]))
        values = range(start, start + step * int(rng.integers(50, 140)), step)
        other = int(rng.choice([512, 1000, 1024, 1536, 2048, 3000, 3072, 4096, 6144, 8192]))
        held = Gemm(m=other, n=other, k=int(rng.choice([1024, 2048, 4096, 8192])))
        points = along(axis, values, held)
        along_axis, across = (block_m, block_n) if axis == "m" else (block_n, block_m)
        on_a_plateau = gpu.resident * along_axis / (step * ceil(other / across))
        if (
            on_a_plateau >= _FEWEST_ON_A_PLATEAU
            and step <= along_axis
            and gpu.waves(points[-1][1]) >= 3
        ):
            return Case(gpu, axis, points)


@dataclass
class SimulatedWorker:
    """Stands in for the sweep's worker process: answers products with a simulated GPU's times."""

    gpu: SimulatedGpu
    noise: float = 0.0
    samples: int = 10
    seed: int = 0
    asked: list[Gemm] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self.hello = Hello(self.gpu.spec(), STATE, {"simulator": "1"})
        self._rng = np.random.default_rng(self.seed)

    def begin(self, timing: TimingOptions) -> None:
        pass

    def ask(self, request: Request, limit_s: float, tick: Callable[[], None]) -> Reply:
        assert isinstance(request.workload, Gemm)
        self.asked.append(request.workload)
        samples_us = noisy_us(
            self.gpu.time_us(request.workload), self.noise, self.samples, self._rng
        )
        return Reply(measurement=measurement(samples_us), launch=self.gpu.launch(request.workload))

    def close(self) -> None:
        self.closed = True
