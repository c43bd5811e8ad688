"""Fills README.md with a plot of a measured staircase, its explanation, and output of commands.

A staircase is a curve of GEMM times over m that jumps at tile and wave edges. `write_front` is the
entry point.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill as fill_lines

import numpy as np

from quantbench.analysis.check import check_run
from quantbench.analysis.summary import Point, points_of, rows_of
from quantbench.cli.output import SafeConsole
from quantbench.errors import StoreError
from quantbench.launch import Tile
from quantbench.quantization import cdiv, quantize
from quantbench.report.canvas import CLIFF_COLOUR, figure
from quantbench.report.content import PALETTE
from quantbench.report.source import picture_caption
from quantbench.report.sweep_result import ops_line, sizes_table
from quantbench.report.terminal import drawn
from quantbench.store.folder import Run, read_run
from quantbench.store.run import RunInfo
from quantbench.units import counted
from quantbench.workload import Gemm
from tools.guide.markers import fill

PAGE = Path("README.md")
PICTURE = Path("docs/figures/h200-staircase.png")
_RUNS = Path("results/h200-sxm-141gb")
#: run whose results README shows as those of a sweep
HIDDEN_RUN = _RUNS / "2026-11-27T010823-hidden"
# Run of our persistent kernel and of cuBLAS over n, and run of cuBLAS over m with `--refine`.
_N_RUN = _RUNS / "2026-11-27T011007-n"
_M_RUN = _RUNS / "2026-11-27T011056-m"
BENCHMARK = "pytest --benchmark-only --benchmark-columns=median,iqr,rounds"
EXPORT = f"quantbench profile export {HIDDEN_RUN}"
ADVISE = "quantbench advise --gpu a100-sxm4-80gb --model gpt2-xl --attention flash"
# Beginnings of the lines of advice that README shows.
_SHOWN_ADVICE = ("op ", "logits", "mlp_", "all of it", "wasted past", "Worth a change")
# Beginnings of the lines of the benchmark's table that README shows.
_SHOWN_BENCHMARKS = ("Name", "test_gemm[0-")
# Number of lines of the sweep's table that README shows.
_SHOWN_LINES = 5

_KERNEL = "triton.persistent@128x128"
_LIBRARY = "torch.mm"
_TILE = Tile(128, 128)
# Sizes that are multiples of this number have rows that are aligned to 128 bytes.
_ALIGNED = 64
# Width of the terminal in which commands run, in characters.
_COLUMNS = 100


@dataclass(frozen=True)
class Staircase:
    """Measured times over n of two providers of one product, at aligned sizes.

    points: points of _KERNEL.
    library: points of _LIBRARY.
    """

    info: RunInfo
    points: Sequence[Point]
    library: Sequence[Point]

    @property
    def edge(self) -> tuple[Point, Point]:
        """The two neighbours of _KERNEL between which the time grows most."""
        return max(pairwise(self.points), key=lambda pair: pair[1].latency_us / pair[0].latency_us)

    def waves(self, gemm: Gemm) -> int:
        return quantize(gemm, _TILE, self.info.device.sm_count).num_waves


def read_staircase(root: Path) -> Staircase:
    """Reads the run over n.

    root: folder of the checkout.
    """
    run = read_run(root / _N_RUN)
    aligned = [p for p in points_of(run.records, run.info.device) if p.axes["n"] % _ALIGNED == 0]
    ours = [point for point in aligned if point.provider == _KERNEL]
    library = [point for point in aligned if point.provider == _LIBRARY]
    return Staircase(run.info, ours, library)


def staircase_text(found: Staircase, root: Path) -> str:
    """Formats the description of the plot as Markdown."""
    before, after = found.edge
    gemm = _gemm(before)
    sm_count = found.info.device.sm_count
    rows = cdiv(gemm.m, _TILE.block_m)
    columns = cdiv(gemm.n, _TILE.block_n)
    columns_after = cdiv(_gemm(after).n, _TILE.block_n)
    tiles_after = rows * columns_after
    waves = found.waves(gemm)
    waves_after = found.waves(_gemm(after))
    last = tiles_after - (waves_after - 1) * sm_count
    cause = (
        f"Measured on an H200 with torch {found.info.software['torch']}, m = {gemm.m}, k = "
        f"{gemm.k}: n = {_gemm(after).n} instead of {gemm.n} takes our persistent kernel "
        f"{_times(before, after)} times as long, and the rate falls from {before.tflops:.0f} to "
        f"{after.tflops:.0f} TFLOP/s. It computes "
        f"tiles of {_TILE.block_m} × {_TILE.block_n}, {sm_count} at a time (a wave), one on each "
        f"SM. At n = {gemm.n} there are {rows} × {columns} = {rows * columns} tiles: "
        f"{counted(waves, 'wave')}. At n = {_gemm(after).n} there are {rows} × {columns_after} = "
        f"{tiles_after}: {counted(waves_after, 'wave')}, and the last one has "
        f"{counted(last, 'tile')} for {sm_count} places. It takes as long as a full wave."
    )
    cliffs = check_run(read_run(root / _M_RUN), rules=()).cliffs
    cliff = max((c for c in cliffs if c.next == c.at + 1), key=lambda c: c.ratio)
    library = (
        f"A library that chooses among many tiles has cliffs elsewhere: with n = k = "
        f"{_gemm(cliff.before).n}, m = {cliff.next} instead of {cliff.at} takes cuBLAS "
        f"{cliff.ratio:.2f} times as long, because {cliff.cause.words}. `--refine` finds the row. "
        "[More from this GPU](docs/evidence.md)."
    )
    return "\n\n".join([fill_lines(cause, 118), fill_lines(library, 118)]) + "\n"


def _gemm(point: Point) -> Gemm:
    assert isinstance(point.workload, Gemm)
    return point.workload


def _times(before: Point, after: Point) -> str:
    return f"{after.latency_us / before.latency_us:.2f}"


def draw_staircase(found: Staircase, path: Path) -> None:
    """Plots time and rate over n as a picture, and marks the largest edge.

    Dashed lines show the time and rate that are computed from tiles and waves.
    """
    before, after = found.edge
    first = _gemm(found.points[0])
    waves = [found.waves(_gemm(point)) for point in found.points]
    wave_us = float(np.median([p.latency_us / n for p, n in zip(found.points, waves, strict=True)]))
    sizes = np.arange(first.n, _gemm(found.points[-1]).n + 1)
    gemms = [replace(first, n=n) for n in sizes.tolist()]
    times_us = wave_us * np.array([found.waves(gemm) for gemm in gemms])
    rates = np.array([gemm.flops for gemm in gemms]) / times_us / 1e6
    edge_n = [_gemm(before).n, _gemm(after).n]
    title = f"{first.m} × {first.k} times {first.k} × n over n"
    caption = picture_caption(found.info, found.points)
    with figure(path, (8.2, 6.2), 2, title=title, caption=caption, sharex=True) as panels:
        for (panel,), computed, name, unit in (
            (panels[0], times_us, "latency_us", "time, µs"),
            (panels[1], rates, "tflops", "TFLOP/s"),
        ):
            label = f"computed: waves of {found.info.device.sm_count} tiles, {wave_us:.1f} µs each"
            panel.plot(sizes, computed, "--", color="0.4", linewidth=1.0, label=label)
            for points, colour in ((found.points, PALETTE[0]), (found.library, PALETTE[1])):
                panel.plot(
                    [_gemm(point).n for point in points],
                    [getattr(point, name) for point in points],
                    "o-",
                    color=colour,
                    markersize=3,
                    linewidth=1.0,
                    label=f"measured: {points[0].provider}",
                )
            ends = [getattr(point, name) for point in (before, after)]
            panel.plot(edge_n, ends, "-", color=CLIFF_COLOUR, linewidth=2.4, zorder=4)
            panel.set_ylabel(unit)
        panels[0][0].set_ylim(bottom=0)
        panels[0][0].annotate(
            f"n = {edge_n[0]} → {edge_n[1]}: {_times(before, after)} times the time",
            (edge_n[1], after.latency_us),
            xytext=(10, -28),
            textcoords="offset points",
            fontsize=9,
            color=CLIFF_COLOUR,
        )
        panels[1][0].set_xlabel("n (columns of the product); sizes that are multiples of 64")


def printed(command: str, folder: Path) -> list[str]:
    """Runs a Python module in a terminal of 100 columns, and returns the lines that it prints.

    command: name of the module, and its arguments.
    folder: working directory of the command.
    Raises StoreError if the command fails.
    """
    terminal, inside = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(_COLUMNS), "TERM": "dumb", "NO_COLOR": "1"}
    environment.pop("FORCE_COLOR", None)
    environment.pop("LINES", None)
    with subprocess.Popen(
        [sys.executable, "-m", *command.split()], stdin=subprocess.DEVNULL, stdout=inside,
        stderr=subprocess.PIPE, env=environment, cwd=folder,
    ) as process:  # fmt: skip
        os.close(inside)
        output = b""
        with suppress(OSError):  # Linux raises it when the command has closed its end
            while read := os.read(terminal, 1 << 16):
                output += read
        os.close(terminal)
        assert process.stderr is not None
        error = process.stderr.read().decode(errors="replace")
    if process.returncode:
        raise StoreError("front page", f"{command}: {error.strip()[-200:]}", "a run without error")
    return [line.rstrip() for line in output.decode().replace("\r\n", "\n").splitlines()]


def advise_text() -> str:
    """Runs ADVISE, and returns the lines that README shows as a Markdown block."""
    lines = printed(ADVISE, Path.cwd())
    kept = [line for line in lines if line.lstrip().startswith(_SHOWN_ADVICE)]
    return _block(ADVISE, kept)


def benchmark_text(root: Path) -> str:
    """Measures this machine, and returns the first lines of the table of GEMMs as a Markdown block.

    root: folder of the checkout.
    """
    lines = printed(BENCHMARK, root)
    first = next(i for i, line in enumerate(lines) if "benchmark 'gemm" in line)
    kept = [line for line in lines[first:] if line.startswith(_SHOWN_BENCHMARKS)]
    return _block(BENCHMARK, [*kept[:3], "…"])


def sweep_text(run: Run) -> str:
    """Returns the first rows of a stored sweep's table of results as a Markdown block."""
    rows = rows_of(points_of(run.records, run.info.device))
    shown_text = StringIO()
    SafeConsole(width=120, file=shown_text).print(
        drawn(sizes_table(rows, check_run(run, rules=())), narrowest=20)
    )
    head, *lines = [line.rstrip() for line in shown_text.getvalue().splitlines()]
    shown = [ops_line(rows), head, *lines[:_SHOWN_LINES], "…"]
    return _block("quantbench sweep --dim hidden", shown)


def export_text(root: Path) -> str:
    """Exports HIDDEN_RUN, and returns what the command prints as a Markdown block.

    root: folder of the checkout.
    """
    with TemporaryDirectory() as folder:
        (Path(folder) / "results").symlink_to(root.resolve() / "results")
        return _block(EXPORT, [line for line in printed(EXPORT, Path(folder)) if line])


def _block(command: str, lines: Sequence[str]) -> str:
    # Prose is folded at spaces. Rows of tables, which have wide gaps, stay whole.
    folded = [line if "   " in line else fill_lines(line, _COLUMNS) for line in lines]
    return "\n".join(["```text", f"$ {command}", *folded, "```", ""])


def write_front(root: Path) -> list[Path]:
    """Draws the plot and fills README.md; returns the paths of both.

    root: folder of the checkout.
    """
    found = read_staircase(root)
    values = {
        "benchmark": benchmark_text(root),
        "sweep": sweep_text(read_run(root / HIDDEN_RUN)),
        "export": export_text(root),
        "staircase": staircase_text(found, root),
        "advise": advise_text(),
    }
    draw_staircase(found, root / PICTURE)
    path = root / PAGE
    path.write_text(fill(path.read_text(encoding="utf-8"), values), encoding="utf-8")
    return [root / PICTURE, path]


if __name__ == "__main__":
    print(*write_front(Path()), sep="\n")
