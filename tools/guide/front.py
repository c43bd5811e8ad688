"""Fills README.md with a plot of a measured staircase, its explanation, and output of commands.

A staircase is a curve of GEMM times over n that jumps at wave edges.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill as fill_lines

import numpy as np

from quantbench.analysis.blocks import TileInUse
from quantbench.analysis.check import RunCheck, check_run
from quantbench.analysis.curves import Curve
from quantbench.analysis.summary import Point, points_of, rows_of
from quantbench.cli.output import SafeConsole
from quantbench.errors import StoreError
from quantbench.quantization import Quantization, quantize
from quantbench.report.canvas import CLIFF_COLOUR, figure
from quantbench.report.content import PALETTE
from quantbench.report.source import picture_caption
from quantbench.report.sweep_result import ops_line, sizes_table
from quantbench.report.terminal import drawn
from quantbench.store.folder import Run, read_run
from quantbench.store.run import RunInfo
from quantbench.units import latency, percent
from quantbench.workload import Gemm
from tools.accuracy.scoring import FloatArray
from tools.guide.markers import fill

PAGE = Path("README.md")
PICTURE = Path("docs/figures/h200-staircase.png")
_RUNS = Path("results/h200-sxm-141gb")
#: run whose result README shows as that of a sweep
SWEEP_RUN = _RUNS / "2026-11-27T010823-hidden"
#: run over n of the picture, and run over m of cuBLAS with --refine
WAVES_RUN = _RUNS / "2026-11-27T011007-n"
CUBLAS_RUN = _RUNS / "2026-11-27T011056-m"
BENCHMARK = "pytest --benchmark-only --benchmark-columns=median,iqr,rounds"
EXPORT = f"quantbench profile export {SWEEP_RUN}"
ADVISE = "quantbench advise --gpu a100-sxm4-80gb --model gpt2-xl --attention flash"
# Beginnings of the lines of advice that README shows.
_SHOWN_ADVICE = ("op ", "logits", "mlp_", "all of it", "wasted past", "Worth a change")
# Beginnings of the lines of the benchmark's table that README shows.
_SHOWN_BENCHMARKS = ("Name", "test_gemm[0-")
# Sizes of the sweep that README shows: the last two before a fall of the rate, and the next.
_SHOWN_HIDDEN = (4160, 4224, 4288)
# Rows of so many bf16 numbers begin at multiples of 128 bytes.
_MULTIPLE = 64
# Width of the terminal in which commands run, in characters.
_COLUMNS = 100


@dataclass(frozen=True)
class Staircase:
    """Times over n of a Triton kernel, whose tile is fixed, and of cuBLAS.

    info: run that measured both.
    tile: tile of the Triton kernel.
    """

    info: RunInfo
    triton: Curve
    cublas: Curve
    tile: TileInUse

    @property
    def edge(self) -> tuple[Point, Point]:
        """The Triton kernel's two neighbouring points of which the first has the fullest waves."""
        steps = pairwise(self.triton.points)
        return max(steps, key=lambda step: self.waves(step[0].axes["n"]).efficiency)

    def waves(self, n: int) -> Quantization:
        """Returns the tiles and waves of the Triton kernel."""
        held = self.info.options["held"]
        return quantize(Gemm(held["m"], n, held["k"]), self.tile.tile, self.tile.resident_blocks)

    def busy_shares(self, sizes: Iterable[int]) -> FloatArray:
        """Returns the share of the SMs' time in which they compute tiles, (sizes,), 0 to 1."""
        return np.array([self.waves(n).efficiency for n in sizes])


def read_staircase(root: Path) -> Staircase:
    """Reads WAVES_RUN.

    root: folder of the checkout.
    """
    run = read_run(root / WAVES_RUN)
    points = points_of(run.records, run.info.device)
    aligned = [point for point in points if point.axes["n"] % _MULTIPLE == 0]
    check = check_run(run, rules=(), points=aligned)
    cublas, triton = check.curves["n"]
    tile = check.tile_of(triton.points[0])
    assert tile is not None
    return Staircase(run.info, triton, cublas, tile)


def staircase_text(found: Staircase, library: RunCheck) -> str:
    """Formats the description of the plot as Markdown.

    library: check of CUBLAS_RUN.
    """
    before, after = found.edge
    full = found.waves(before.axes["n"])
    over = found.waves(after.axes["n"])
    growths: dict[bool, list[float]] = {True: [], False: []}
    for a, b in pairwise(found.triton.points):
        added = found.waves(b.axes["n"]).num_waves > found.waves(a.axes["n"]).num_waves
        growths[added].append(b.latency_us / a.latency_us - 1)
    waves = (
        f"The Triton kernel (blue) computes tiles of {found.tile.tile.block_m} × "
        f"{found.tile.tile.block_n}, and the {found.info.device.sm_count} SMs of the H200 compute "
        f"{full.resident_blocks} tiles at a time (a wave). At n = {before.axes['n']} there are "
        f"{full.num_tiles} tiles, {full.num_waves} full waves: {latency(before.latency_us)}, "
        f"{before.tflops:.0f} TFLOP/s. At n = {after.axes['n']} there are {over.num_tiles}: "
        f"{over.num_waves} waves, and the last one has {over.last_wave_tiles} tiles for "
        f"{over.resident_blocks} places. It takes {after.latency_us / before.latency_us:.2f} times "
        f"as long: {latency(after.latency_us)}, {after.tflops:.0f} TFLOP/s. From each n to the "
        f"next, the time grows by {percent(min(growths[True]))} to {percent(max(growths[True]))} "
        f"where a wave is added, and by at most {percent(max(growths[False]))} elsewhere."
    )
    cliff = library.cliffs[0]
    size = cliff.before.workload
    assert isinstance(size, Gemm)
    cublas = (
        f"cuBLAS (`torch.mm`) changes its kernel with the size. With n = {size.n} and k = "
        f"{size.k}, m = {cliff.next} instead of {cliff.at} takes {cliff.ratio:.2f} times as long: "
        f"{cliff.cause.words}. `--refine` found this row."
    )
    source = (
        f"Measured by us: `{WAVES_RUN}` (left out are n that are no multiple of {_MULTIPLE}: their "
        f"rows are aligned to 16 bytes, not 128) and `{CUBLAS_RUN}`."
    )
    return "\n\n".join([fill_lines(text, 118) for text in (waves, cublas, source)]) + "\n"


def draw_staircase(found: Staircase, path: Path) -> None:
    """Plots time and rate over n as a picture, and marks one wave edge.

    Dashed lines show the time and rate that are computed from tiles and waves.
    """
    sizes = found.triton.sizes
    before, after = found.edge
    edge = (before.axes["n"], after.axes["n"])
    rates = [point.tflops for point in found.triton.points]
    full_rate = np.median(np.divide(rates, found.busy_shares(sizes)))
    computed_n = np.arange(sizes[0], sizes[-1] + 1)
    computed_rates = full_rate * found.busy_shares(computed_n.tolist())
    times_us = before.workload.flops / edge[0] * computed_n / computed_rates / 1e6
    computed = f"computed from waves, at the median rate: {found.tile.words}"
    title = "GEMM over n, m = {m}, k = {k}".format_map(found.info.options["held"])
    caption = picture_caption(found.info, found.triton.points)
    with figure(path, (8.2, 6.2), 2, title=title, caption=caption, sharex=True) as panels:
        for panel, name, line, lowest, unit in (
            (panels[0][0], "latency_us", times_us, 0, "time, µs"),
            (panels[1][0], "tflops", computed_rates, 550, "TFLOP/s (axis from 550)"),
        ):
            value = attrgetter(name)
            panel.plot(computed_n, line, "--", color="0.3", linewidth=1.0, label=computed, zorder=3)
            for curve, colour in ((found.triton, PALETTE[0]), (found.cublas, PALETTE[1])):
                panel.plot(
                    curve.sizes,
                    list(map(value, curve.points)),
                    ".-",
                    color=colour,
                    linewidth=1.2,
                    label=f"measured: {curve.provider}",
                )
            panel.plot(edge, (value(before), value(after)), color=CLIFF_COLOUR, linewidth=2.4)
            panel.set_ylim(bottom=lowest)
            panel.set_ylabel(unit)
        panels[0][0].annotate(
            f"n = {edge[0]} → {edge[1]}: {after.latency_us / before.latency_us:.2f} times the "
            f"time,\n{found.waves(edge[0]).num_waves} → {found.waves(edge[1]).num_waves} waves",
            (edge[1], after.latency_us),
            xytext=(10, -36),
            textcoords="offset points",
            fontsize=9,
            color=CLIFF_COLOUR,
        )
        panels[1][0].set_xlabel("n (columns of the product)")


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
    """Returns a few rows of a stored sweep's table of results as a Markdown block."""
    rows = rows_of(points_of(run.records, run.info.device))
    rows = tuple(row for row in rows if row.axes["hidden"] in _SHOWN_HIDDEN)
    shown_text = StringIO()
    SafeConsole(width=_COLUMNS, file=shown_text).print(
        drawn(sizes_table(rows, check_run(run, rules=())), narrowest=20)
    )
    head, *lines = [line.rstrip() for line in shown_text.getvalue().splitlines()]
    return _block("quantbench sweep --dim hidden", [ops_line(rows), head, "…", *lines, "…"])


def export_text(root: Path) -> str:
    """Exports SWEEP_RUN, and returns what the command prints as a Markdown block.

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
        "sweep": sweep_text(read_run(root / SWEEP_RUN)),
        "export": export_text(root),
        "staircase": staircase_text(found, check_run(read_run(root / CUBLAS_RUN), rules=())),
        "advise": advise_text(),
    }
    draw_staircase(found, root / PICTURE)
    path = root / PAGE
    path.write_text(fill(path.read_text(encoding="utf-8"), values), encoding="utf-8")
    return [root / PICTURE, path]


if __name__ == "__main__":
    print(*write_front(Path()), sep="\n")
