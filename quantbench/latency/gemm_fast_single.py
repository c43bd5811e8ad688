"""One shape at a time: the arithmetic of `gemm_form` and the trees of `gemm_fast` as plain Python numbers.

An array operation on one number costs as much as thirty additions, so nothing here is an array. The form, with the
constants of a model put in for their names, and its trees, as nested conditional expressions, become Python functions
that are compiled when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import exp, inf, log, log2
from typing import TYPE_CHECKING

import numpy as np

from quantbench.latency.gemm_form import LEAST_K, LONG_US, MOST_MISALIGNED, POWER_WIDTH, STEP_K
from quantbench.latency.gemm_menu import LARGEST_TILE
from quantbench.latency.gemm_parameters import Values

if TYPE_CHECKING:
    from quantbench.latency.gemm_fast import FastGemm
    from quantbench.latency.gemm_forest import Forest

_LEAST_K = int(LEAST_K)
_REMEMBERED = 2**16  # shapes; planners ask for the same ones again and again
_NEGLIGIBLE = 5.0  # widths of the choice by which a kernel that counts is at most slower

_Physics = Callable[[int, int, int], tuple[float, int]]

# Bytes read and written, from memory and from L2, and what misaligned rows cost; `every` is the working set.
_TRAFFIC = """
def physics(m, n, k):
    a = ELEMENT * m * k
    b = ELEMENT * k * n
    c = OUTPUT * m * n
    every = a + b + c
    x = (log(every) - AT_A) * NARROW
    read = a if x > 40.0 else 0.0 if x < -40.0 else a / (1.0 + exp(-x))
    x = (log(every + 5.0 * b) - AT_B) * NARROW
    read += b if x > 40.0 else 0.0 if x < -40.0 else b / (1.0 + exp(-x))
    read_l2_us = (a + b - read) * US_PER_L2_BYTE
    x = (log(every + 5.0 * c) - AT_C) * NARROW
    share = 1.0 if x > 40.0 else 0.0 if x < -40.0 else 1.0 / (1.0 + exp(-x))
    written = c * (share * WRITE_COST)
    written_l2_us = c * (WRITE_COST - share * WRITE_COST) * US_PER_L2_BYTE
    low = n * OUTPUT
    low &= -low
    slow_padded = 1.0 if low >= 16 else exp(MISALIGNED * (4.0 - log2(low)))
    low = k * ELEMENT
    low &= -low
    slow = 1.0 if low >= 16 else exp(MISALIGNED * (4.0 - log2(low)))
    if slow < slow_padded:
        slow = slow_padded
    best = 0
    least = limit = inf
"""

# One kernel's time. A kernel slower than the best by five widths of the choice changes nothing: where a part of its
# time says so already, that part stands for it.
_KERNEL = """
    tiles = -(-m // BLOCK_M) * -(-n // BLOCK_N)
    blocks = tiles * SPLIT
    fluid = blocks / RESIDENT
    soft = fluid if fluid > BUSY else BUSY
    time = soft * US_PER_K * (k / SPLIT + FILL)
    if time <= limit:
        full = blocks // RESIDENT
        rest = blocks - full * RESIDENT
        waves = stepped = full
        if rest:
            last = -(-rest // SMS) / HELD
            stepped += last if last > BUSY else BUSY
            waves += 1
            per_byte = US_PER_BYTE if full else (
                (1.0 + (BANDWIDTH / (blocks * FLOW)) ** FLOW_POWER) ** (1.0 / FLOW_POWER) / BANDWIDTH
            )
        else:
            per_byte = US_PER_BYTE
        k_part = -(-k // SPLIT_STEP) * STEP
        arithmetic = (stepped + FLUID_SHARE * (soft - stepped) if soft < stepped else stepped) * US_PER_K * (
            k_part * (slow_padded if k < SPLIT_STEP else slow) + FILL
        )
        l2 = (blocks if blocks > SMS else SMS) * L2_US * k_part
        memory = read * per_byte + read_l2_us
        time = arithmetic if arithmetic > memory else memory
        if time <= limit and l2 <= limit:
            main_loop = (arithmetic**OVERLAP + memory**OVERLAP + l2**OVERLAP) ** (1.0 / OVERLAP)
            write = written * per_byte + written_l2_us
            joined = (main_loop**JOIN + write**JOIN) ** (1.0 / JOIN)
            time = (FIXED + joined + PER_WAVE * waves + PER_STEP * k_part + PARTIAL * tiles) * (1.0 + fluid) ** SMALL
            if time < least:
                least, best, limit = time, NUMBER, time * NEGLIGIBLE
        elif time < l2:
            time = l2
    timeNUMBER = time
"""

_CHOICE = """
    log_us = log(least) - WIDTH * log(total)
    x = (log(m * n * k * LONG_SHARE) - POWER_AFTER) / POWER_WIDTH
    if x > -40.0:
        log_us += POWER / (1.0 + exp(-x))
    if m == 1 or n == 1:
        vector = log(VECTOR_LAUNCH + (read + written) / VECTOR_SPEED + read_l2_us + written_l2_us)
        if vector < log_us:
            log_us = vector
    return log_us, best
"""


def _with(text: str, constants: dict[str, float]) -> str:
    """The text with numbers for the names in capitals, longest first: one name may be a part of another."""
    for name in sorted(constants, key=len, reverse=True):
        text = text.replace(name, repr(constants[name]))
    return text


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


def _compiled(source: str, name: str) -> Callable[..., object]:
    names: dict[str, Callable[..., object]] = {"exp": exp, "log": log, "log2": log2}
    names["inf"] = inf  # type: ignore[assignment]
    exec(compile(source, "<a GEMM model>", "exec"), names)  # only arithmetic on numbers
    return names[name]


def single_function(fast: FastGemm, *, rising: bool = True) -> Callable[[int, int, int], float]:
    """A function (m, n, k) → µs that agrees with `fast.predict_us`; rising: as there."""
    from quantbench.latency.gemm_fast import WATCHED

    machine, most = fast.machine, fast.most
    correction: Callable[..., float] = _compiled(tree_source(fast.forest), "correction")  # type: ignore[assignment]
    physics = _physics(fast, range(len(fast.menu)))
    flop_per_us = machine.flop_per_us
    (m0, n0, held0), (m1, n1, held1), (m2, n2, held2) = WATCHED
    slots0, slots1, slots2 = (machine.sm_count * held for held in (held0, held1, held2))
    area0, area1 = m0 * n0, m1 * n1

    @lru_cache(maxsize=_REMEMBERED)  # halves of one k are often another's: tensor-parallel degrees, powers of two
    def raw(m: int, n: int, k: int) -> tuple[float, int]:
        deep = k if k > _LEAST_K else _LEAST_K
        log_us, best = physics(m, n, deep)
        tiles0 = -(-m // m0) * -(-n // n0)
        tiles1 = -(-m // m1) * -(-n // n1)
        tiles2 = -(-m // m2) * -(-n // n2)
        add = correction(
            log2(m), log2(n), log2(deep), log_us, tiles0 / (-(-tiles0 // slots0) * slots0),
            tiles1 / (-(-tiles1 // slots1) * slots1), tiles2 / (-(-tiles2 // slots2) * slots2),
            m * n / (tiles0 * area0), m * n / (tiles1 * area1),
        )  # fmt: skip
        add = most if add > most else -most if add < -most else add
        return (log_us if k >= _LEAST_K else physics(m, n, k)[0]) + add, best

    per_flop_us = 2.0 / flop_per_us

    def as_it_comes(m: int, n: int, k: int) -> float:
        us, least_us = exp(raw(m, n, k)[0]), m * n * k * per_flop_us
        return us if us > least_us else least_us

    if not rising:
        return lru_cache(maxsize=_REMEMBERED)(as_it_comes)
    alone = [_physics(fast, (i,)) for i in range(len(fast.menu))]

    def single_us(m: int, n: int, k: int) -> float:
        found, best = raw(m, n, k)
        half = k
        while half > _LEAST_K and half % 2 == 0:
            half //= 2
            if alone[best](m, n, half)[0] + most <= found:
                break
            other = raw(m, n, half)[0]
            if other > found:
                found = other
        return max(exp(found), 2.0 * m * n * k / flop_per_us)

    return lru_cache(maxsize=_REMEMBERED)(single_us)


def _physics(fast: FastGemm, kernels: Sequence[int]) -> _Physics:
    """A function (m, n, k) → (log µs, the best of `kernels`): the form with its constants folded in."""
    machine, menu, values = fast.machine, fast.menu, Values(fast.parameters)
    p = {name: float(values[name][0]) for name in _USED}
    tile_rate = [float(x) for x in values.tiles(menu.tile_index)]
    sms, width = machine.sm_count, exp(p["choice"])
    bandwidth = exp(p["dram"]) * machine.bytes_per_us
    l2_speed, l2_to_sm = bandwidth * exp(p["l2_speed"]), bandwidth * exp(p["l2_to_sm"])
    flow_power = 1.0 + exp(p["flow_norm"])
    launch, wave_us, log_l2 = exp(p["launch"]), exp(p["wave"]), log(machine.l2_bytes)
    common: dict[str, float] = {
        "ELEMENT": machine.element_bytes, "OUTPUT": machine.output_bytes, "AT_A": p["hot_a"] + log_l2,
        "AT_B": p["hot_b"] + log_l2, "AT_C": p["hot_c"] + log_l2, "NARROW": exp(-p["hot_width"]),
        "US_PER_L2_BYTE": 1.0 / l2_speed, "WRITE_COST": exp(p["write"]),
        "MISALIGNED": min(p["misaligned"], MOST_MISALIGNED), "SMS": sms, "FILL": exp(p["fill"]),
        "FLUID_SHARE": 1.0 / (1.0 + exp(-p["fluid"])), "BANDWIDTH": bandwidth, "FLOW_POWER": flow_power,
        "STEP": int(STEP_K), "OVERLAP": 1.0 + exp(p["overlap"]), "JOIN": 1.0 + exp(p["write_overlap"]),
        "NEGLIGIBLE": exp(_NEGLIGIBLE * width), "WIDTH": width, "LONG_SHARE": 2.0 / machine.flop_per_us / LONG_US,
        "POWER": 0.1 * max(p["power"], 0.0), "POWER_AFTER": p["power_after"], "POWER_WIDTH": POWER_WIDTH,
        "VECTOR_LAUNCH": exp(p["launch"] + p["vector_launch"]), "VECTOR_SPEED": bandwidth * exp(p["vector_flow"]),
    }  # fmt: skip
    parts = [_with(_TRAFFIC, common)]
    for number in kernels:
        bm, bn, split = int(menu.block_m[number]), int(menu.block_n[number]), int(menu.split_k[number])
        held, area, growth = float(menu.blocks_per_sm[number]), bm * bn / 16384.0, log((bm + bn) / 256.0)
        rate = exp(p["efficiency"] + tile_rate[number]) * machine.flop_per_us / sms
        fixed = launch + exp(p["prologue"]) * area - wave_us
        flow = exp(p["block_flow"] + p["block_flow_growth"] * growth)
        if split > 1:
            fixed += exp(p["split"]) + exp(p["split_steps"]) * log2(split) + exp(p["split_serial"]) * (split - 1)
        own = {
            "BLOCK_M": bm, "BLOCK_N": bn, "SPLIT": split, "RESIDENT": int(sms * held), "HELD": held, "NUMBER": number,
            "BUSY": min(exp(p["saturation"]) / held, 1.0), "US_PER_K": held * 2.0 * bm * bn / rate, "FLOW": flow,
            "US_PER_BYTE": (1.0 + (bandwidth / (sms * held * flow)) ** flow_power) ** (1.0 / flow_power) / bandwidth,
            "SPLIT_STEP": split * int(STEP_K), "L2_US": (bm + bn) * machine.element_bytes / l2_to_sm, "FIXED": fixed,
            "PER_WAVE": wave_us + exp(p["epilogue"]) * area * held,
            "PER_STEP": exp(p["step"] + p["step_growth"] * growth) / STEP_K,
            "PARTIAL": 8.0 * bm * bn * split / (l2_speed * exp(p["split_speed"])) if split > 1 else 0.0,
            "SMALL": exp(p["small_tile"]) * log2(LARGEST_TILE / (bm * bn)),
        }  # fmt: skip
        parts.append(_with(_KERNEL, {**common, **own}))
    shares = [f"((least / time{i}) ** {1.0 / width!r} if time{i} < limit else 0.0)" for i in kernels]
    parts.append(f"    total = {' + '.join(shares)}\n")
    parts.append(_with(_CHOICE, common))
    return _compiled("".join(parts), "physics")  # type: ignore[return-value]


_USED = (
    "efficiency", "fill", "saturation", "fluid", "dram", "block_flow", "block_flow_growth", "flow_norm", "l2_speed",
    "hot_a", "hot_b", "hot_c", "hot_width", "write", "l2_to_sm", "overlap", "write_overlap", "launch", "prologue",
    "wave", "epilogue", "step", "step_growth", "split", "split_steps", "split_speed", "split_serial", "small_tile",
    "choice", "power", "power_after", "vector_launch", "vector_flow", "misaligned",
)  # fmt: skip
