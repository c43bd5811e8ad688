"""`quantbench predict`: what a sweep would show on a GPU that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantbench.analysis.forecast import Forecast, cliff_odds, forecast
from quantbench.cli.grid_options import GridOptions, assumed_words, held_and_dims, sweep_words
from quantbench.cli.options import AsJson, Gpu, grouped
from quantbench.cli.output import check_file, output, print_json, say
from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.model_times import ModelTimes, best_gemm_model
from quantbench.latency.op_times import RememberedTimes
from quantbench.planner.calibration import shipped
from quantbench.report.forecast import draw_forecast, forecast_table, forecast_to_json, odds_in_words, summed_line
from quantbench.sweep.axes import Axis, with_defaults
from quantbench.sweep.edges import parse_grid


@grouped
def predict(
    gpu: Gpu,
    arguments: GridOptions,
    plot: Annotated[Path | None, typer.Option(help="PNG file for a plot of the predicted times.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict a sweep on any known GPU: no hardware, no extra needed."""
    spec = lookup(gpu)
    if spec.kind != "cuda":
        raise InputError("predict", f"--gpu {gpu}", "a GPU: processors are measured, not predicted")
    if plot is not None:
        if plot.suffix != ".png":
            raise InputError("predict", f"--plot {plot}", "a name that ends in .png")
        check_file("predict --plot", plot)
    axes, found, assumed = predict_sweep(arguments, spec)
    odds = cliff_odds(found.rows, best_gemm_model(spec, _dtype(found))[0])
    if plot is not None:
        dtypes = ", ".join(dict.fromkeys(op.op.workload.dtype for row in found.rows for op in row.estimate.ops))
        title = f"{spec.name} · {dtypes} · predicted, with 90 % intervals"
        draw_forecast(found.rows, axes[0].field, spec, plot, title=title, caption="; ".join(found.notes))
    if as_json:
        answer = {
            "device": spec.name, "dtype": _dtype(found), "assumed": list(assumed), "notes": list(found.notes),
            "rows": forecast_to_json(found.rows, spec, odds), "impossible": list(found.impossible),
            "plot": None if plot is None else str(plot),
        }  # fmt: skip
        print_json(answer)
        return
    console = output()
    say(console, f"{spec.name}: predicted, nothing is run")
    if assumed:
        say(console, f"assumed: {', '.join(assumed)}")
    for note in found.notes:
        say(console, f"  {note}")
    if found.impossible:
        say(console, f"{len(found.impossible)} sizes are left out, the first because {found.impossible[0]}")
    if said := summed_line(found.rows):
        say(console, said)
    console.print(forecast_table(found.rows))
    if said := odds_in_words(found.rows, odds):
        say(console, said)
    if plot is not None:
        say(console, f"\npicture: {plot}")
    say(console, f"\nOn such a card, measure it: quantbench sweep {sweep_words(arguments)}")


def _dtype(found: Forecast) -> str:
    return found.rows[0].estimate.ops[0].op.workload.dtype


def predict_sweep(arguments: GridOptions, spec: DeviceSpec) -> tuple[tuple[Axis, ...], Forecast, tuple[str, ...]]:
    """The axes with their values, the forecast for a device, and what was assumed, in words."""
    held, dims = held_and_dims(arguments, "predict")
    held = with_defaults(held, spec)
    if spec.peak(held.dtype) is None:
        raise InputError("predict", f"--dtype {held.dtype} on {spec.name}", "one of " + ", ".join(spec.peak_tflops))
    grid = parse_grid(dims, held, spec, "predict")
    loose = arguments.skip_impossible or grid.loose
    share = shipped().elsewhere.unaligned_share
    times = RememberedTimes(ModelTimes(spec), softmax=held.softmax, unaligned_share=share)
    found = forecast(grid.axes, held, times, skip_impossible=loose)
    assumed = assumed_words(arguments, held, {op.op.name for op in found.ops}, spec, "predict")
    return grid.axes, found, assumed
