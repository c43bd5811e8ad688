"""Products that models are asked for: each side up to the largest that they know, batches of any length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quantbench.errors import InputError
from quantbench.latency.gemm.model import LARGEST_SIDE, GemmModel
from quantbench.latency.transformer import WorkEstimate
from quantbench.workload import Gemm


def require_reach(m: int, n: int, k: int) -> None:
    """Raise InputError for a product with a side that no model of products knows."""
    beyond = [f"{name} = {size}" for name, size in (("m", m), ("n", n), ("k", k)) if size > LARGEST_SIDE]
    if beyond:
        what = f"at most {LARGEST_SIDE}: no time is predicted of larger products"
        raise InputError(f"product {m}×{n}×{k}", beyond[0], what)


def predict_within_reach(model: GemmModel, gemms: Sequence[Gemm]) -> list[WorkEstimate]:
    """A model's estimates of products, in order, of whatever format as if they were of the model's own.

    A batch with more rows than the model knows is asked for as far as it does know; the rest grows in proportion, as
    so long a batch does. Raises InputError for a product with a larger side.
    """
    asked = [_within_reach(gemm) for gemm in gemms]
    found = model.predict_gemms([replace(part, dtype=model.dtype, accumulate="") for part, _ in asked])
    return [_times(one, times) for one, (_, times) in zip(found, asked, strict=True)]


def _within_reach(gemm: Gemm) -> tuple[Gemm, float]:
    """What is asked for in the place of a product, and how many times its time that takes."""
    require_reach(gemm.m, gemm.n, gemm.k)
    if gemm.batch * gemm.m <= LARGEST_SIDE:
        return gemm, 1.0
    most = LARGEST_SIDE // gemm.m
    return replace(gemm, batch=most), gemm.batch / most


def _times(found: WorkEstimate, times: float) -> WorkEstimate:
    if times == 1.0:
        return found
    one = found.estimate
    more = replace(one, latency_us=times * one.latency_us, low_us=times * one.low_us, high_us=times * one.high_us)
    return replace(found, estimate=more, waves=None if found.waves is None else round(times * found.waves))
