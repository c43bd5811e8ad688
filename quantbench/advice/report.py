"""Writes the result of `quantbench advise` as JSON, as shapes for a sweep, and as JUnit XML."""

from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from quantbench.advice.advise import Advice, Advised
from quantbench.advice.cost import LOWER_BOUND, OpCost, ShapeCost
from quantbench.junit import Case, write_suite
from quantbench.latency.estimate import Estimate
from quantbench.store.typed import encode
from quantbench.sweep.shape_file import Gain, NamedShape
from quantbench.units import percent

_ADVICE_FORMAT = "quantbench-advice"
_ADVICE_VERSION = 1


def advice_to_json(advice: Advice) -> dict[str, Any]:
    """Returns the whole advice as JSON objects, with the most wasteful ops first."""
    return {
        "format": _ADVICE_FORMAT,
        "version": _ADVICE_VERSION,
        "device": advice.device.name,
        "missing": list(advice.missing),
        "blocks": list(advice.blocks),
        "too_large": advice.too_large,
        "unmeasured": [asdict(one) for one in advice.unmeasured],
        "op_times": advice.note,
        "keep": advice.keep,
        "shape": asdict(advice.shape),
        **_totals(advice.cost),
        "broken_rules": [{**asdict(one), "words": one.words} for one in advice.broken],
        "ops": [_op_to_json(op, advice.cost) for op in chain(*advice.cost.by_name.values())],
        "tried": advice.tried,
        "space": asdict(advice.space),
        "neighbours": list(map(_advised_to_json, advice.neighbours)),
        "same_heads_or_head_dim": list(map(_advised_to_json, advice.alike)),
        "one_change": list(map(_advised_to_json, advice.singles)),
    }


def named_shapes(advice: Advice) -> tuple[NamedShape, ...]:
    """Returns the shape and all others in the advice, with their predicted gains.

    The result is input of `sweep --shapes`.
    """
    named = [NamedShape("the shape as it is", advice.shape)]
    for one in advice.compared:
        found = one.found
        name = f"{one.changes}, head_dim {found.shape.head_dim}"  # unique among the shapes
        named.append(NamedShape(name, found.shape, Gain(found.gain, found.low, found.high)))
    return tuple(named)


def _totals(cost: ShapeCost) -> dict[str, Any]:
    hours = cost.gpu_hours_per_trillion_tokens
    return {
        **_latency(cost.latency),
        "tflops": cost.tflops,
        "gpu_hours_per_trillion_tokens": hours(cost.latency.latency_us),
        "gpu_hours_note": LOWER_BOUND,
        "waste_us": cost.waste_us,
        "waste_low_us": cost.waste_low_us,
        "waste_high_us": cost.waste_high_us,
        "waste_share": cost.waste_share,
        "waste_gpu_hours_per_trillion_tokens": hours(cost.waste_us),
    }


def _latency(latency: Estimate) -> dict[str, float]:
    return {"latency_us": latency.latency_us, "low_us": latency.low_us, "high_us": latency.high_us}


def _op_to_json(cost: OpCost, whole: ShapeCost) -> dict[str, Any]:
    tile = cost.launch and cost.launch.tile
    return {
        "op": cost.op.label,
        "workload": encode(cost.op.workload),
        "count": cost.op.count,
        **_latency(cost.latency),
        "share": cost.total_us / whole.latency.latency_us,
        "tile": tile and asdict(tile),
        "quantization": cost.quantization and asdict(cost.quantization),
        "waste_us": cost.waste_us,
        "waste_gpu_hours_per_trillion_tokens": whole.gpu_hours_per_trillion_tokens(cost.waste_us),
        "edges": [
            {
                "kind": one.edge.kind,
                "reason": one.edge.words,
                "before": encode(one.edge.before),
                "waste_us": one.waste_us,
                "waste_low_us": one.low_us,
                "waste_high_us": one.high_us,
            }
            for one in cost.findings
        ],
    }


def _advised_to_json(advised: Advised) -> dict[str, Any]:
    found = advised.found
    return {
        "shape": asdict(found.shape),
        "changes": advised.changes,
        "gain": found.gain,
        "gain_low": found.low,
        "gain_high": found.high,
        "surely_faster": found.sure,
        "parameters": found.parameters,
        "parameters_change": found.parameters_change,
        "move": found.move,
        "no_nearer_equals": found.nearest,
        "reasons": list(found.reasons),
        **_totals(advised.cost),
    }


def write_junit(cost: ShapeCost, allowed: float | None, path: Path) -> None:
    """Writes a shape's waste as JUnit XML: a test case for each op, and one for the whole shape.

    allowed: largest waste, as a share of the time, with which the test case of the whole shape
        passes. None allows any waste.

    Raises StoreError if the file cannot be written.
    """
    text = f"{percent(cost.waste_share)} of the time is wasted past edges"
    failure = ""
    if allowed is not None and cost.waste_share > allowed:
        text += f", {percent(allowed)} allowed"
        failure = "waste"
    cases = [Case("quantbench.advise", "waste past edges", text, failure=failure)]
    for op in cost.ops:
        share = percent(op.waste_us / cost.latency.latency_us)
        text = f"{op.op.workload}: {share} of the whole time wasted"
        for edge in op.edges:
            text += f"\n{edge.kind}: {edge.words}"
        cases.append(Case("quantbench.advise", op.op.label, text, op.latency.latency_us / 1e6))
    write_suite(path, "quantbench advise", cases)
