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
from importlib.metadata import metadata
from io import StringIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill as fill_lines

import numpy as np

from quantbench.analysis.check import check_run
from quantbench.analysis.curves import Curve, curves_of, fit_curves, repeatability
from quantbench.analysis.periods import find_periods
from quantbench.analysis.staircase import TileCandidate
from quantbench.analysis.summary import Point, points_of, rows_of
from quantbench.cli.output import SafeConsole
from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import StoreError
from quantbench.importers import aiconfigurator
from quantbench.importers.runs import write_run
from quantbench.quantization import cdiv, quantize
from quantbench.report.canvas import CLIFF_COLOUR, figure
from quantbench.report.content import PALETTE
from quantbench.report.source import picture_caption
from quantbench.report.sweep_result import ops_line, sizes_table
from quantbench.report.terminal import drawn
from quantbench.store.folder import Run, read_run
from quantbench.store.run import RunInfo
from quantbench.units import counted, percent
from quantbench.workload import Gemm
from tools.accuracy.scoring import FloatArray
from tools.guide.markers import fill

PAGE = Path("README.md")
PICTURE = Path("docs/figures/a100-staircase.png")
#: run whose result README shows as that of a sweep on a CPU
CPU_RUN = Path("results/cpu-amd-epyc/2026-11-20T153933-hidden")
BENCHMARK = "pytest --benchmark-only --benchmark-columns=median,iqr,rounds"
EXPORT = f"quantbench profile export {CPU_RUN}"
ADVISE = "quantbench advise --gpu a100-sxm4-80gb --model gpt2-xl --attention flash"
# Beginnings of the lines of advice that README shows.
_SHOWN_ADVICE = ("op ", "logits", "mlp_", "all of it", "wasted past", "Worth a change")
# Beginnings of the lines of the benchmark's table that README shows.
_SHOWN_BENCHMARKS = ("Name", "test_gemm[0-")
# Number of the sweep's sizes that README shows.
_SHOWN_ROWS = 3

_GPU = "a100-sxm4-80gb"
_N = 4096
_K = 4096
# Sizes in m, from half a wave of large tiles up to the last closely spaced size in the table.
_SHOWN_M = range(256, 4354)
# Width of the terminal in which commands run, in characters.
_COLUMNS = 100


@dataclass(frozen=True)
class Staircase:
    """Times over m of the A100's GEMMs with one n and k, and the tile that explains the steps.

    info: run into which the table was imported.
    rows: number of GEMMs in the whole table.
    """

    info: RunInfo
    curve: Curve
    tile: TileCandidate
    rows: int

    @property
    def spec(self) -> DeviceSpec:
        return self.info.device

    @property
    def edge(self) -> tuple[Point, Point]:
        """The two points, with m and m + 1 rows, between which the time grows most."""
        pairs = pairwise(self.curve.points)
        adjacent = [(a, b) for a, b in pairs if b.axes["m"] == a.axes["m"] + 1]
        return max(adjacent, key=lambda pair: pair[1].latency_us / pair[0].latency_us)

    @property
    def columns(self) -> int:
        """Number of tile columns of the GEMM."""
        return cdiv(_N, self.tile.block_n)

    def busy_shares(self, sizes: Sequence[int]) -> FloatArray:
        """Returns the share of the SMs' time in which they compute tiles, (sizes,), 0 to 1."""
        tile = self.tile
        found = [quantize(Gemm(m, _N, _K), tile.tile, tile.resident_blocks) for m in sizes]
        return np.array([one.efficiency for one in found])

    def num_waves(self, m: int) -> int:
        return cdiv(cdiv(m, self.tile.block_m) * self.columns, self.tile.resident_blocks)


def read_staircase() -> Staircase:
    """Imports the table, and finds the tile that explains the steps of its times.

    Raises StoreError if no tile explains them.
    """
    with TemporaryDirectory() as folder:
        (table,), _ = aiconfigurator.find_tables(_GPU, kinds=("gemm",))
        rows = aiconfigurator.read_rows(table, dtypes=("bf16",))
        spec = lookup(_GPU)
        run = read_run(write_run(Path(folder), spec, aiconfigurator.origin_of(table), rows).folder)
    points = points_of(run.records, run.info.device)
    curves = curves_of(points, "m")
    (period,) = find_periods(fit_curves(curves, repeatability(run.records)), run.info.device)
    (curve,) = [one for one in curves if one.held == (("n", _N), ("k", _K))]
    curve = replace(curve, points=tuple(p for p in curve.points if p.axes["m"] in _SHOWN_M))
    if period.chosen is None:
        raise StoreError("front page", run.info.source, "a table whose steps one tile explains")
    return Staircase(run.info, curve, period.chosen, len(points))


def staircase_text(found: Staircase) -> str:
    """Formats the description of the plot as Markdown."""
    before, after = found.edge
    m = before.axes["m"]
    tile = found.tile
    at_a_time = tile.resident_blocks
    rows = cdiv(m, tile.block_m)
    rows_after = cdiv(m + 1, tile.block_m)
    tiles = rows * found.columns
    tiles_after = rows_after * found.columns
    waves = found.num_waves(m + 1)
    last = tiles_after - (waves - 1) * at_a_time
    package, _, table = found.info.source.partition(": ")
    licence = metadata(package.split()[0])["License-Expression"]
    cause = (
        f"One row more, m = {m + 1} instead of {m}, takes "
        f"{after.latency_us / before.latency_us:.2f} times as long: the rate falls from "
        f"{before.tflops:.0f} to {after.tflops:.0f} TFLOP/s. The steps of the whole table are "
        f"those of {tile.block_m} × {tile.block_n} tiles, and the {found.spec.sm_count} SMs of the "
        f"A100 compute {at_a_time} tiles at a time (a wave). At m = {m} there are {rows} × "
        f"{found.columns} = {tiles} tiles: {counted(found.num_waves(m), 'wave')}. At m = {m + 1} "
        f"there are {rows_after} × {found.columns} = {tiles_after}: {counted(waves, 'wave')}, and "
        f"the last one has {counted(last, 'tile')} for {at_a_time} places. It takes as long as a "
        "full wave."
    )
    source = (
        f"Imported data, not measured by us: {found.rows:,} bf16 products of {table}, in {package} "
        f"({licence}), read with `quantbench import aiconfigurator --system a100_sxm --table gemm`."
    )
    return "\n\n".join([fill_lines(cause, 118), fill_lines(source, 118)]) + "\n"


def draw_staircase(found: Staircase, path: Path) -> None:
    """Plots time and rate over m as a picture, and marks the largest edge.

    Dashed lines show the time and rate that are computed from tiles and waves.
    """
    sizes = found.curve.sizes
    before, after = found.edge
    m = before.axes["m"]
    measured_us = [point.latency_us for point in found.curve.points]
    measured_rates = [point.tflops for point in found.curve.points]
    full_rate = np.median(np.divide(measured_rates, found.busy_shares(sizes)))
    computed_m = np.arange(sizes[0], sizes[-1] + 1)
    rates = full_rate * found.busy_shares(computed_m.tolist())
    times_us = 2.0 * computed_m * _N * _K / rates / 1e6
    tile = found.tile
    waves = f"waves of {tile.resident_blocks}, on {found.spec.sm_count} SMs"
    computed = f"computed: {tile.block_m}x{tile.block_n} tiles in {waves}"
    title = f"m × {_K} times {_K} × {_N} over m"
    caption = picture_caption(found.info, found.curve.points)
    with figure(path, (8.2, 6.2), 2, title=title, caption=caption, sharex=True) as panels:
        for panel, measured, line, unit in (
            (panels[0][0], measured_us, times_us, "time, µs"),
            (panels[1][0], measured_rates, rates, "TFLOP/s"),
        ):
            panel.plot(computed_m, line, "--", color="0.4", linewidth=1.0, label=computed)
            panel.plot(
                sizes,
                measured,
                "o-",
                color=PALETTE[0],
                markersize=4,
                linewidth=1.2,
                label="measured (imported table)",
            )
            edge = slice(sizes.index(m), sizes.index(m) + 2)
            panel.plot(
                sizes[edge], measured[edge], "-", color=CLIFF_COLOUR, linewidth=2.4, zorder=4
            )
            panel.set_ylim(bottom=0)
            panel.set_ylabel(unit)
        slower = after.latency_us / before.latency_us
        waves = counted(found.num_waves(m), "wave")
        waves_after = counted(found.num_waves(m + 1), "wave")
        style = {"textcoords": "offset points", "fontsize": 9, "color": CLIFF_COLOUR}
        panels[0][0].annotate(
            f"m = {m} → {m + 1}: {slower:.2f} times the time,\n{waves} → {waves_after} of tiles",
            (m + 1, after.latency_us),
            xytext=(10, -26),
            va="top",
            **style,
        )
        panels[1][0].annotate(
            f"−{percent(1 - after.tflops / before.tflops)}",
            (m + 1, after.tflops),
            xytext=(6, -4),
            fontweight="bold",
            **style,
        )
        panels[1][0].set_xlabel("m (rows of the product; tokens of a layer)")


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
    """Returns the last rows of a stored sweep's table of results as a Markdown block."""
    rows = rows_of(points_of(run.records, run.info.device))
    shown_text = StringIO()
    SafeConsole(width=120, file=shown_text).print(
        drawn(sizes_table(rows, check_run(run, rules=())), narrowest=20)
    )
    head, *lines = [line.rstrip() for line in shown_text.getvalue().splitlines()]
    shown = [ops_line(rows), head, "…", *lines[-_SHOWN_ROWS:]]
    return _block("quantbench sweep --dim hidden", shown)


def export_text(root: Path) -> str:
    """Exports CPU_RUN, and returns what the command prints as a Markdown block.

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
    found = read_staircase()
    values = {
        "benchmark": benchmark_text(root),
        "sweep": sweep_text(read_run(root / CPU_RUN)),
        "export": export_text(root),
        "staircase": staircase_text(found),
        "advise": advise_text(),
    }
    draw_staircase(found, root / PICTURE)
    path = root / PAGE
    path.write_text(fill(path.read_text(encoding="utf-8"), values), encoding="utf-8")
    return [root / PICTURE, path]


if __name__ == "__main__":
    print(*write_front(Path()), sep="\n")
