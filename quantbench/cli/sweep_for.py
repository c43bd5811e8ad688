"""Selects the points for `sweep --for`: those that a planner's tables need, most informative first.

The points are the GEMMs and the attention that an inference engine runs for the named models, at
the sizes that `profile export` writes. The sweep first covers the whole range of m for each (n, k),
and of sequence lengths for each number of heads. It then fills in the sizes between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from shlex import quote
from typing import TypeVar

from quantbench.cli.model_options import GridOptions
from quantbench.cli.options import integers
from quantbench.device import default_dtype
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.profile.exporters.aiconfigurator import PRODUCT_DTYPES
from quantbench.profile.exporters.modelled import M_GRID
from quantbench.sweep.options import SweepOptions
from quantbench.sweep.plan import point_estimate_s
from quantbench.workload import Attention, Gemm
from quantbench.workload.dtypes import MEASURED_DTYPES, VECTOR_DTYPES
from quantbench.workload.serving import Served, served

_T = TypeVar("_T")
#: GEMM sizes m to measure: four per octave, and each of them plus 1, because one more row may need
#: one more row of tiles.
_QUARTERS = product(M_GRID[:-1], (4, 5, 6, 7), (0, 1))
SIZES = sorted({low * quarters // 4 + more for low, quarters, more in _QUARTERS} | {M_GRID[-1]})
# Steps between the positions that `spread` visits in a group, as fractions of the group: from one
# round to the next, and from one group to the next. Multiples of the golden ratio modulo 1 are
# spread evenly however many there are. The same holds for √2.
_ROUND_STEP = 5**0.5 / 2 - 0.5
_GROUP_STEP = 2**0.5
#: maximum number of points in a plan
_MOST_POINTS = 5000
# A point is left out if it needs more than the fraction _MOST_BUDGET of the time budget, or if its
# inputs and outputs need more than the fraction _MOST_MEMORY of the device's memory. The checks
# make copies of inputs and outputs.
_MOST_BUDGET = 0.05
_MOST_MEMORY = 0.25
# First compute capability for which torch has FlashAttention. Source: PyTorch, sdp_utils.cpp,
# `check_flash_attention_hardware_support` (sm80 to sm121).
_FIRST_FLASH = (8, 0)
# From this compute capability on, cuDNN's attention is measured as well. On an H200 it is faster
# than torch's FlashAttention 2, and serving engines have FlashAttention 3 (docs/evidence.md).
_FIRST_CUDNN = (9, 0)


def spread(groups: Sequence[Sequence[_T]]) -> list[_T]:
    """Merges groups in rounds. Each round takes one item from every group.

    The items taken in the first rounds are spread evenly over each group, at positions that differ
    from group to group.

    groups: items of each group, in order of size.

    >>> spread([[1, 2, 3], [10, 20, 30]])
    [1, 20, 2, 10, 3, 30]
    """
    rounds = []
    for i, group in enumerate(groups):
        turn = i * _ROUND_STEP % 1  # mixes groups of different kinds
        count = len(group)
        places = [(r * _ROUND_STEP + i * _GROUP_STEP) % 1 * count for r in range(4 * count)]
        visited = dict.fromkeys([*map(int, places), *range(count)])
        rounds += [((number, turn), group[j]) for number, j in enumerate(visited)]
    rounds.sort(key=lambda one: one[0])
    return [item for _, item in rounds]


def planner_groups(wanted: Served, dtypes: Sequence[str]) -> list[list[Gemm | Attention]]:
    """Returns groups of points, each sorted by the bytes that a point moves.

    Each (n, k) with each dtype is a group over all sizes m. Each entry of `wanted.heads` without a
    sliding window gives two groups: attention over prompts, and attention while decoding.

    wanted: GEMM sizes (n, k) and attention heads of the models.
    dtypes: dtypes of the GEMMs. Attention has the first of them in which attention can be measured,
        else bf16.
    """
    groups: list[list[Gemm | Attention]] = []
    for dtype, (n, k) in product(dtypes, wanted.products):
        groups.append([Gemm(m, n, k, dtype=dtype, layout="nt") for m in SIZES])
    half = next((dtype for dtype in dtypes if dtype in VECTOR_DTYPES), "bf16")
    for heads in wanted.heads:
        if not heads.window:
            groups += [[*heads.prompts(half)], [*heads.decodes(half)]]
    return [sorted(group, key=lambda work: work.min_bytes) for group in groups]


def with_points(
    options: SweepOptions, planner: str, arguments: GridOptions, spec: DeviceSpec
) -> SweepOptions:
    """Returns the options of a sweep, with the points that a planner needs as `works`.

    planner: planner's format in `profile export`.
    arguments: models, tensor-parallel degrees and dtype as typed.

    Raises InputError if no point fits into the budget.
    """
    configs = () if arguments.config is None else (arguments.config,)
    degrees = integers("--tp", arguments.sizes.get("tp", ""))
    wanted = served("sweep", arguments.model, configs, degrees)
    dtypes = _dtypes(arguments.dtype, spec)

    def fits(work: Gemm | Attention) -> bool:
        if work.min_bytes > _MOST_MEMORY * spec.memory_bytes:
            return False
        needed_s = point_estimate_s(work, options.timing, spec)
        return options.budget_s is None or needed_s <= _MOST_BUDGET * options.budget_s

    groups = [list(filter(fits, group)) for group in planner_groups(wanted, dtypes)]
    works = spread(groups)[:_MOST_POINTS]
    if not works:
        too_short = f"no point of --for {planner} fits into {options.budget_s} s"
        raise InputError("sweep", too_short, "a longer --budget")
    if options.providers == ("torch",):
        capability = spec.compute_capability or _FIRST_FLASH
        providers = ["torch.mm", "torch.flash" if capability >= _FIRST_FLASH else "torch.efficient"]
        if capability >= _FIRST_CUDNN:
            providers.insert(1, "torch.cudnn")
        options = replace(options, providers=tuple(providers))
    export = _export_words(planner, arguments, dtypes, spec)
    return replace(options, works=tuple(works), export=export)


def _dtypes(asked: str, spec: DeviceSpec) -> tuple[str, ...]:
    """Returns the dtypes of the GEMMs to measure.

    By default these are the planner's dtypes that can be measured on the device. If there are none,
    or on a CPU, the device's usual dtype is returned.

    asked: value of --dtype, which is then the only dtype; "" if it was not typed.

    Raises InputError for a dtype that the planner does not have.
    """
    if spec.kind == "cpu":
        return (asked or default_dtype(spec),)
    measured = [dtype for dtype in PRODUCT_DTYPES if dtype in MEASURED_DTYPES]
    if asked:
        return (require_choice("sweep", "--dtype", asked, (*measured, "fp16")),)
    found = tuple(dtype for dtype in measured if spec.peak(dtype) is not None)
    return found or (default_dtype(spec),)


def _export_words(
    planner: str, arguments: GridOptions, dtypes: Sequence[str], spec: DeviceSpec
) -> str:
    """Returns the options with which `profile export` writes the planner's files from the run."""
    if spec.kind == "cpu":  # planners know GPUs only
        return "--format csv"
    words = [f"--format {planner}"]
    for name in ("model", "config", "tp"):
        value = getattr(arguments, name)
        if value:
            words.append(f"--{name} {quote(str(value))}")
    if dtypes == ("fp16",):  # fp16 is exported only with --dtype fp16
        words.append("--dtype fp16")
    return " ".join(words)


def planner_assumptions(options: SweepOptions, spec: DeviceSpec) -> tuple[str, ...]:
    """Describes what a sweep for a planner assumes, and which ops it does not measure."""
    words = [f"by {', '.join(options.providers)}", "linear layers of layout nt"]
    words.append("all-reduce is modelled unless `torchrun -m quantbench comm` measures it")
    words.append("experts, sliding windows, latent attention and FP8 caches are modelled")
    if spec.kind == "cpu":
        words.append("planners know GPUs only, so the times are exported as CSV")
    return tuple(words)
