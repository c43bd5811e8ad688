"""One shape at a time: the arithmetic of `gemm_form` and the trees of `gemm_fast` in plain Python numbers.

An array operation on one number costs as much as thirty additions, so nothing here is an array. The trees become one
Python function of nested conditional expressions, compiled when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import exp, inf, log, log2
from typing import TYPE_CHECKING, Any

import numpy as np

from quantbench.latency.gemm_form import LONG_US, MOST_MISALIGNED, POWER_WIDTH, STEP_K
from quantbench.latency.gemm_menu import LARGEST_TILE
from quantbench.latency.gemm_parameters import Values

if TYPE_CHECKING:
    from quantbench.latency.gemm_fast import FastGemm
    from quantbench.latency.gemm_forest import Forest

# block_m, block_n, split_k, resident blocks, blocks per SM, then costs: see where it is made
_Kernel = tuple[Any, ...]
_LEAST_K = 32
_REMEMBERED = 2**16  # shapes; planners ask for the same ones again and again
_NEGLIGIBLE = 5.0  # widths of the choice by which a kernel that counts is at most slower


def tree_source(forest: Forest) -> str:
    """A Python function of the features x0, x1, … that returns the mean of the trees."""

    def expression(node: int) -> str:
        threshold = float(forest.threshold[node])
        if np.isinf(threshold):
            return repr(float(forest.value[node]))
        left, right = expression(node + 1), expression(int(forest.right[node]))
        return f"({left} if x{int(forest.feature[node])} <= {threshold!r} else {right})"

    count = int(forest.feature.max()) + 1
    lines = [f"def correction({', '.join(f'x{i}' for i in range(count))}, *_):", "    total = 0.0"]
    lines += [f"    total += {expression(int(root))}" for root in forest.roots]
    lines.append(f"    return total / {len(forest.roots)}")
    return "\n".join(lines) + "\n"


def _compiled(forest: Forest) -> Callable[..., float]:
    names: dict[str, Callable[..., float]] = {}
    exec(compile(tree_source(forest), "<trees of a GEMM model>", "exec"), names)  # only numbers and comparisons
    return names["correction"]


def single_function(fast: FastGemm, *, rising: bool = True) -> Callable[[int, int, int], float]:
    """A function (m, n, k) → µs that agrees with `fast.predict_us`; rising: as there."""
    from quantbench.latency.gemm_fast import WATCHED

    machine, correction, most = fast.machine, _compiled(fast.forest), fast.most
    physics, one_kernel = _physics(fast)
    sms, flop_per_us = machine.sm_count, machine.flop_per_us
    watched = [(bm, bn, sms * held, bm * bn) for bm, bn, held in WATCHED]

    def raw(m: int, n: int, k: int) -> tuple[float, int]:
        deep = k if k > _LEAST_K else _LEAST_K
        log_us, best = physics(m, n, deep)
        fills, pads = [], []
        for bm, bn, held, area in watched:
            tiles = -(-m // bm) * -(-n // bn)
            fills.append(tiles / (-(-tiles // held) * held))
            pads.append(m * n / (tiles * area))
        add = correction(log2(m), log2(n), log2(deep), log_us, *fills, pads[0], pads[1])
        add = most if add > most else -most if add < -most else add
        return (log_us if k >= _LEAST_K else physics(m, n, k)[0]) + add, best

    def single_us(m: int, n: int, k: int) -> float:
        found, best = raw(m, n, k)
        half = k if rising else 0
        while half > _LEAST_K and half % 2 == 0:
            half //= 2
            if one_kernel(best, m, n, half) + most <= found:
                break
            other = raw(m, n, half)[0]
            if other > found:
                found = other
        return max(exp(found), 2.0 * m * n * k / flop_per_us)

    return lru_cache(maxsize=_REMEMBERED)(single_us)


def _physics(
    fast: FastGemm,
) -> tuple[Callable[[int, int, int], tuple[float, int]], Callable[[int, int, int, int], float]]:
    """(log µs and best kernel of a shape, log µs of one kernel for a shape): the form with its constants folded in."""
    machine, menu, values = fast.machine, fast.menu, Values(fast.parameters)
    p = {name: float(values[name][0]) for name in _USED}
    tile_rate = [float(x) for x in values.tiles(menu.tile_index)]
    sms, element, output = machine.sm_count, machine.element_bytes, machine.output_bytes
    bandwidth = exp(p["dram"]) * machine.bytes_per_us
    l2_speed, l2_to_sm = bandwidth * exp(p["l2_speed"]), bandwidth * exp(p["l2_to_sm"])
    flow_power, overlap, write_overlap = (1.0 + exp(p[x]) for x in ("flow_norm", "overlap", "write_overlap"))
    fluid_share = 1.0 / (1.0 + exp(-p["fluid"]))
    fill, wave_us, misaligned = exp(p["fill"]), exp(p["wave"]), min(p["misaligned"], MOST_MISALIGNED)
    width = exp(p["choice"])
    per_width, negligible = 1.0 / width, exp(_NEGLIGIBLE * width)
    narrow, log_l2 = exp(-p["hot_width"]), log(machine.l2_bytes)
    at_a, at_b, at_c = (p[x] + log_l2 for x in ("hot_a", "hot_b", "hot_c"))
    write_cost, power, power_after = exp(p["write"]), 0.1 * max(p["power"], 0.0), p["power_after"]
    launch, vector_launch = exp(p["launch"]), exp(p["launch"] + p["vector_launch"])
    vector_speed = bandwidth * exp(p["vector_flow"])
    kernels: list[_Kernel] = []
    for i in range(len(menu)):
        bm, bn, split = int(menu.block_m[i]), int(menu.block_n[i]), int(menu.split_k[i])
        held, area, growth = float(menu.blocks_per_sm[i]), bm * bn / 16384.0, log((bm + bn) / 256.0)
        rate = exp(p["efficiency"] + tile_rate[i]) * machine.flop_per_us / sms
        fixed = launch + exp(p["prologue"]) * area - wave_us
        flow = exp(p["block_flow"] + p["block_flow_growth"] * growth)
        full_per_byte = (1.0 + (bandwidth / (sms * held * flow)) ** flow_power) ** (1.0 / flow_power) / bandwidth
        if split > 1:
            fixed += exp(p["split"]) + exp(p["split_steps"]) * log2(split)
        kernels.append(
            (
                bm, bn, split, int(sms * held), held, min(exp(p["saturation"]) / held, 1.0),
                held * 2.0 * bm * bn / rate,
                flow, full_per_byte, (bm + bn) * element / l2_to_sm, fixed,
                wave_us + exp(p["epilogue"]) * area * held, exp(p["step"] + p["step_growth"] * growth) / STEP_K,
                8.0 * bm * bn * split / (l2_speed * exp(p["split_speed"])) if split > 1 else 0.0,
                exp(p["small_tile"]) * log2(LARGEST_TILE / (bm * bn)),
            )
        )  # fmt: skip

    def hot(log_bytes: float, at: float) -> float:
        x = (log_bytes - at) * narrow
        return 1.0 if x > 40.0 else 0.0 if x < -40.0 else 1.0 / (1.0 + exp(-x))

    def shape(m: int, n: int, k: int) -> tuple[float, float, float, float, float, float]:
        a, b, c = element * m * k, element * k * n, output * m * n
        every = a + b + c
        read = a * hot(log(every), at_a) + b * hot(log(every + 5.0 * b), at_b)
        share = hot(log(every + 5.0 * c), at_c) * write_cost
        slow_n, slow_k = unaligned(n * output), unaligned(k * element)
        return read, a + b - read, c * share, c * (write_cost - share), slow_n, max(slow_n, slow_k)

    def unaligned(row_bytes: int) -> float:
        low = row_bytes & -row_bytes
        return 1.0 if low >= 16 else exp(misaligned * (4.0 - log2(low)))

    def kernel_us(kernel: _Kernel, m: int, n: int, k: int, traffic: tuple[float, ...], limit: float) -> float:
        """µs of one kernel; where arithmetic or traffic alone takes longer than `limit`, only those."""
        (bm, bn, split, resident, held, busy, per_k, flow, full_per_byte, l2_cost, fixed, per_wave, per_step, partial,
         small) = kernel  # fmt: skip
        read, read_l2, written, written_l2, slow_padded, slow = traffic
        tiles = -(-m // bm) * -(-n // bn)
        blocks = tiles * split
        fluid = blocks / resident
        full = blocks // resident
        rest = blocks - full * resident
        stepped: float = full
        waves = full
        if rest:
            last = -(-rest // sms) / held
            stepped += last if last > busy else busy
            waves += 1
        soft = fluid if fluid > busy else busy
        arithmetic_waves = stepped + fluid_share * (soft - stepped) if soft < stepped else stepped
        k_part = -(-k // (split * STEP_K)) * STEP_K
        if k < split * STEP_K:
            slow = slow_padded
        arithmetic = arithmetic_waves * per_k * (k_part * slow + fill)
        l2 = (blocks if blocks > sms else sms) * l2_cost * k_part
        if arithmetic > limit:
            return float(arithmetic)
        if full:
            per_byte = full_per_byte
        else:
            per_byte = (1.0 + (bandwidth / (blocks * flow)) ** flow_power) ** (1.0 / flow_power) / bandwidth
        memory = read * per_byte + read_l2 / l2_speed
        if memory > limit or l2 > limit:
            return float(max(memory, l2))
        main_loop = (arithmetic**overlap + memory**overlap + l2**overlap) ** (1.0 / overlap)
        write = written * per_byte + written_l2 / l2_speed
        joined = (main_loop**write_overlap + write**write_overlap) ** (1.0 / write_overlap)
        time = fixed + joined + per_wave * waves + per_step * k_part + partial * tiles
        return float(time * (1.0 + fluid) ** small)

    def finish(log_us: float, m: int, n: int, k: int, traffic: tuple[float, ...]) -> float:
        x = (log(2.0 * m * n * k / machine.flop_per_us / LONG_US) - power_after) / POWER_WIDTH
        log_us += power / (1.0 + exp(-x)) if x > -40.0 else 0.0
        if m == 1 or n == 1:
            read, read_l2, written, written_l2, _, _ = traffic
            vector = log(vector_launch + (read + written) / vector_speed + (read_l2 + written_l2) / l2_speed)
            return vector if vector < log_us else log_us
        return log_us

    def physics(m: int, n: int, k: int) -> tuple[float, int]:
        traffic = shape(m, n, k)
        # A kernel slower than the best by five widths of the choice changes nothing: its time need not be exact.
        times, least, limit = [], inf, inf
        for kernel in kernels:
            time = kernel_us(kernel, m, n, k, traffic, limit)
            times.append(time)
            if time < least:
                least, limit = time, time * negligible
        total = 0.0
        for time in times:
            if time < limit:
                total += (least / time) ** per_width
        return finish(log(least) - width * log(total), m, n, k, traffic), times.index(least)

    def one_kernel(i: int, m: int, n: int, k: int) -> float:
        traffic = shape(m, n, k)
        return finish(log(kernel_us(kernels[i], m, n, k, traffic, inf)), m, n, k, traffic)

    return physics, one_kernel


_USED = (
    "efficiency", "fill", "saturation", "fluid", "dram", "block_flow", "block_flow_growth", "flow_norm", "l2_speed",
    "hot_a", "hot_b", "hot_c", "hot_width", "write", "l2_to_sm", "overlap", "write_overlap", "launch", "prologue",
    "wave", "epilogue", "step", "step_growth", "split", "split_steps", "split_speed", "small_tile", "choice", "power",
    "power_after", "vector_launch", "vector_flow", "misaligned",
)  # fmt: skip
