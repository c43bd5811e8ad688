"""Command `predict`: predicts the result of a sweep on any known GPU, without running kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from quantbench.alignment_rules import Broken, broken_rules, side_names
from quantbench.cli.model_options import (
    GridOptions,
    assumed_words,
    held_and_dims,
    latent_words,
    sweep_words,
)
from quantbench.cli.options import command
from quantbench.cli.output import Lines, Result
from quantbench.cli.pad import first_broken_lines
from quantbench.cli.times import TimesOptions
from quantbench.errors import InputError, UnsupportedError
from quantbench.latency.libraries import resolve_library
from quantbench.sweep.axes import Axis, with_defaults
from quantbench.sweep.sizes import EXPERT_OPS
from quantbench.units import counted
from quantbench.workload import Gemm, MoE

if TYPE_CHECKING:
    from quantbench.analysis.forecast import Forecast
    from quantbench.latency.op_times import OpTimes


@dataclass(frozen=True, kw_only=True)
class PredictOptions(GridOptions, TimesOptions):
    """The options of `predict` as typed."""

    who: ClassVar[str] = "predict"


@command
def predict(arguments: PredictOptions) -> Result:
    """Predict the result of a sweep on any known GPU, without that GPU or optional packages."""
    from quantbench.analysis.forecast import with_cliffs
    from quantbench.report.forecast import (
        forecast_table,
        rises_in_words,
        slower_in_words,
        summed_line,
    )

    times, models = arguments.times()
    spec = times.device
    arguments = replace(arguments, ops=_whole_experts(arguments.ops))
    _, found, assumed = predict_sweep(arguments, times)
    dtype = found.ops[0].op.workload.dtype
    experts = any(isinstance(op.op.workload, MoE) for op in found.ops)
    words = arguments.words(spec, dtype, experts=experts)
    model, _ = models.products(dtype)
    rows = with_cliffs(found.rows, model)
    broken = _crashes(arguments, found, times)

    answer = {
        "device": spec.name,
        "dtype": dtype,
        "library": words,
        "assumed": assumed,
        "unmeasured": found.unmeasured,
        "broken": [one.words for one in broken],
        "notes": found.notes,
        "rows": rows,
        "impossible": found.impossible,
    }

    def lines() -> Lines:
        yield from first_broken_lines(broken)
        if found.unmeasured:
            yield f"not measured, only estimated: {'; '.join(found.unmeasured)}"
        yield f"{spec.name}: predicted, nothing is run; {words}"
        if assumed:
            yield f"assumed: {', '.join(assumed)}"
        for note in found.notes:
            yield f"  {note}"
        if found.impossible:
            sizes = counted(len(found.impossible), "size")
            yield f"left out at {sizes}, the first: {found.impossible[0]}"
        yield from filter(None, [summed_line(rows)])
        yield forecast_table(rows)
        yield from filter(None, [slower_in_words(rows), rises_in_words(rows)])
        yield f"\nOn such a card, measure it: quantbench sweep {sweep_words(arguments)}"

    return Result(answer, lines())


def _crashes(arguments: PredictOptions, found: Forecast, times: OpTimes) -> list[Broken]:
    """Returns the sizes of GEMMs that break a rule that names a crash, each once.

    Logits are left out, because FP8 and FP4 recipes do not quantize them.
    """
    held, _ = held_and_dims(arguments)
    sizes: dict[tuple[str, int], Broken] = {}
    for row in found.rows:
        for one in row.ops:
            op = one.estimate.op
            if not isinstance(op.workload, Gemm) or op.name == "logits":
                continue
            names = side_names(op)
            for broken in broken_rules(
                op.workload,
                library=arguments.library,
                phase=op.phase,
                tp=row.axes.get("tp", held.tp),
                training=held.direction != "forward",
                device=times.device,
            ):
                if broken.rule.effect == "crashes":
                    name = names.get(broken.name, broken.name)
                    sizes.setdefault((name, broken.size), replace(broken, name=name))
    return list(sizes.values())


def _whole_experts(ops: str) -> str:
    """Returns the text of --ops, with `experts` replaced by all expert ops of a layer.

    ops: text of --ops.
    Raises InputError if only some of the expert ops are named, because they are predicted together.
    """
    names = [name.strip() for name in ops.split(",")]
    routed = [name for name in EXPERT_OPS if name in names]
    if "experts" in names:
        others = [name for name in names if name not in ("experts", *routed)]
        return ",".join([*others, *EXPERT_OPS])
    if routed and len(routed) < len(EXPERT_OPS):
        expected = "experts: what is routed in a layer is predicted together"
        raise InputError("predict", f"--ops {routed[0]}", expected)
    return ops


def predict_sweep(
    arguments: PredictOptions, source: OpTimes
) -> tuple[tuple[Axis, ...], Forecast, tuple[str, ...]]:
    """Predicts a sweep; returns the axes, the forecast, and the assumptions as text.

    source: op times from a profile or from a GPU's models.
    Raises InputError for a dtype that the device does not support, and UnsupportedError for
    gradients of experts.
    """
    from quantbench.analysis.forecast import forecast
    from quantbench.latency.op_times import CachedTimes
    from quantbench.sweep.edges import parse_grid

    spec = source.device
    held, dims = held_and_dims(arguments)
    held = with_defaults(held, spec, dims)
    if held.experts and held.direction != "forward":
        what = f"--direction {held.direction} with {held.experts} experts"
        raise UnsupportedError("predict", what, "forward: gradients of experts have no model")
    if spec.peak(held.dtype) is None:
        raise InputError("predict", f"--dtype {held.dtype} on {spec.name}", f"one of {spec.dtypes}")
    resolve_library(spec.name, held.dtype, arguments.library, "predict")
    axes = parse_grid(dims, held, spec, "predict")
    times = CachedTimes(source, softmax=held.softmax)
    found = forecast(axes, held, times)
    ops = {op.op.name for op in found.ops}
    latent = []
    if "attention" in ops:
        # Attention has two GEMMs. The first has the width of the keys, and the second the width of
        # the values. Ordinary heads with the mean width have the same number of FLOPs.
        latent = latent_words(held.kv_rank, (held.head_dim + held.value_dim) // 2)
    if "experts" in ops:
        ops.update(EXPERT_OPS)
    assumed = assumed_words(arguments, held, ops, spec)
    return axes, found, (*assumed, *latent)
