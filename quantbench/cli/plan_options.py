"""Declares the options of the command `plan`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from quantbench.cli.model_options import ShapeOptions
from quantbench.cli.options import option
from quantbench.cli.times import MACHINES, TimesOptions
from quantbench.planner.calibration import STACKS

#: options that describe one layout, by field name; a search may take several values of each
LAYOUT_OPTIONS = (
    "dp",
    "tp",
    "pp",
    "cp",
    "ep",
    "mbs",
    "interleave",
    "zero",
    "recompute",
    "sequence_parallel",
)

_machines = partial(option, panel=MACHINES)
_layout = partial(option, panel="Layout (comma separated lists)")


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The options of `plan` that describe the machines."""

    gpus: int | None = _machines(None, "Number of GPUs.", min=1)
    stack: str = _machines(
        "",
        f"Software: {', '.join(STACKS)} (default: the site's, else megatron; megatron-bridge "
        f"for experts and FP8).",
    )
    site: Path | None = _machines(
        None, "Factors of your site (JSON file, from --fit); they replace the stack's."
    )
    cluster: str = _machines(
        "", "Known system: jean-zay-a100, dgx-a100, … (default: the GPU's reference system)."
    )
    gpus_per_node: int = _machines(0, "GPUs per node (0: the system's).", min=0)
    node_gbit_per_s: float = _machines(
        0, "Bandwidth of a node's network, Gbit/s, all adapters together (0: the system's).", min=0
    )
    link_gb_per_s: float = _machines(
        0, "Bus bandwidth of all-reduce inside a node, GB/s (0: the system's).", min=0
    )
    gbs: int | None = _machines(None, "Global batch size, sequences.", min=1)
    dp_overlap: float | None = _machines(
        None,
        "Share of data-parallel traffic that overlaps with computation (default: the stack's).",
        min=0,
        max=1,
    )


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """The options of `plan` that describe layouts."""

    dp: str = _layout("", "Data-parallel degrees (default: all).")
    tp: str = _layout("", "Tensor-parallel degrees (default: all).")
    pp: str = _layout("", "Pipeline-parallel degrees (default: all).")
    mbs: str = _layout("", "Micro-batch sizes, sequences (default: all).")
    interleave: str = _layout("", "Model chunks per pipeline stage (default: all).")
    zero: str = _layout("", "ZeRO stages, 0 to 3 (default: all).")
    recompute: str = _layout(
        "",
        "Activation recomputation: full, none, selective (default: all; selective without "
        "flash attention only).",
    )
    cp: str = _layout(
        "", "Context-parallel degrees (default: those that leave a GPU 4096 tokens of a sequence)."
    )
    ep: str = _layout("", "Expert-parallel degrees of a model with experts (default: all).")
    sequence_parallel: bool | None = _layout(
        None, "Only layouts with sequence parallelism, or only without (default: both)."
    )
    allow_uneven: bool | None = _layout(
        None,
        "Also try pipeline stages with different numbers of layers (default: with "
        "megatron-bridge).",
        "--allow-uneven/--no-allow-uneven",
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions(LayoutOptions, MachineOptions, TimesOptions, ShapeOptions):
    """The options of `plan` as typed; 0, "" and None mean the default.

    needed: sizes that must be typed if no model is named.
    """

    who: ClassVar[str] = "plan"
    needed: ClassVar[tuple[str, ...]] = ("hidden", "heads", "layers", "vocab")

    optimizer: str = option(
        "", "Optimizer: fused_adam, adam or adam_8bit (default: fused_adam).", panel="Model"
    )
