"""Converts advice on a shape to JSON, and to named shapes for `sweep --shapes` to measure."""

from itertools import chain
from typing import Any

from quantbench.advice.advise import Advice, Advised
from quantbench.advice.cost import LOWER_BOUND, OpCost, ShapeCost
from quantbench.latency.estimate import Estimate
from quantbench.store.typed import encode
from quantbench.sweep.shape_file import Gain, NamedShape


def advice_to_json(advice: Advice) -> dict[str, Any]:
    """Converts advice to a JSON object, as `advise --json` prints it.

    Ops with the most wasted time come first.
    """
    return {
        "device": advice.device.name,
        "missing": advice.missing,
        "blocks": advice.blocks,
        "too_large": advice.too_large,
        "unmeasured": advice.unmeasured,
        "op_times": advice.note,
        "keep": advice.keep,
        "shape": advice.shape,
        **_totals(advice.cost),
        "broken_rules": [{**encode(one), "words": one.words} for one in advice.broken],
        "ops": [_op_to_json(op, advice.cost) for op in chain(*advice.cost.by_name.values())],
        "tried": advice.tried,
        "space": advice.space,
        "neighbours": map(_advised_to_json, advice.neighbours),
        "same_heads_or_head_dim": map(_advised_to_json, advice.alike),
        "one_change": map(_advised_to_json, advice.singles),
    }


def named_shapes(advice: Advice) -> tuple[NamedShape, ...]:
    """Returns the given shape and all other shapes of the advice, for `sweep --shapes`.

    The other shapes have their predicted gains over the given shape.
    """
    named = [NamedShape("the shape as it is", advice.shape)]
    for one in advice.compared:
        found = one.found
        name = f"{one.changes}, head_dim {found.shape.head_dim}"  # unique among the shapes
        named.append(NamedShape(name, found.shape, Gain(found.gain, found.low, found.high)))
    return tuple(named)


def _totals(cost: ShapeCost) -> dict[str, Any]:
    """Returns a shape's time and waste as JSON values, per micro-batch and per 1e12 tokens."""
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
    """Returns a time in µs as JSON values, with its 90 % interval."""
    return {"latency_us": latency.latency_us, "low_us": latency.low_us, "high_us": latency.high_us}


def _op_to_json(cost: OpCost, whole: ShapeCost) -> dict[str, Any]:
    """Returns an op's cost as JSON values.

    whole: cost of the whole shape. The value `share` is the op's fraction of the shape's time.
    """
    return {
        "op": cost.op.label,
        "workload": encode(cost.op.workload),
        "count": cost.op.count,
        **_latency(cost.latency),
        "share": cost.total_us / whole.latency.latency_us,
        "tile": cost.launch and cost.launch.tile,
        "quantization": cost.quantization,
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
    """Returns a compared shape as JSON values, with its predicted gain and cost."""
    found = advised.found
    return {
        "changes": advised.changes,
        **encode(found),
        "sure": found.sure,
        **_totals(advised.cost),
    }
