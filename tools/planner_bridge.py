"""Reads Megatron-Bridge's published runs, and ranks its published layouts among all layouts.

Settings that the published table does not give are taken from Megatron-Bridge's recipes for these
runs: no recomputation, sequence parallelism with tensor parallelism, a distributed optimizer
(ZeRO-3 where the table names FSDP), tokens balanced over the experts, and whole experts on each
GPU. FP8 means current scaling per tensor (fp8cs in the names of the recipes).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.importers.csv_table import CsvFile, CsvRow
from quantbench.latency.interconnect import reference_cluster
from quantbench.latency.op_times import TimesOf
from quantbench.planner.calibration import Calibrations
from quantbench.planner.constraints import is_possible, strict_violations
from quantbench.planner.fitting import Observed, observe
from quantbench.planner.layout import Job, Layout
from quantbench.planner.predict import Prediction
from quantbench.planner.rows import TableRow, case_of
from quantbench.planner.search import LayoutSpace, search
from quantbench.quantization import divisors
from quantbench.workload.presets import preset
from quantbench.workload.recipes import RECIPES

RELEASE = "26.04.01"
STACK = "megatron-bridge"
_GPUS = {
    "DGX-H100": "h100-sxm5-80gb", "DGX-B200": "b200-sxm-180gb", "DGX-B300": "b300-sxm-270gb",
    "DGX-GB200": "gb200-186gb", "DGX-GB300": "gb300-279gb",
}  # fmt: skip
_MODELS = {
    "LLAMA3_70B": "llama-3-70b", "LLAMA3.1_405B": "llama-3.1-405b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b", "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "GPT OSS 120B": "gpt-oss-120b", "DeepSeekV3": "deepseek-v3", "Kimi_K2": "kimi-k2",
}  # fmt: skip
_STATE_SPACE = ("Nemotron_3_Nano", "Nemotron_3_Super")
_RECIPES = {"BF16": "", "FP8": "tensorwise", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
_SHAPE = (
    "hidden", "heads", "kv_heads", "head_dim", "layers", "ffn", "gated", "vocab", "tied", "experts",
    "top_k", "moe_ffn", "shared_ffn", "dense_layers", "expert_groups", "top_groups", "q_rank",
    "kv_rank", "rope_dim", "value_dim",
)  # fmt: skip


def row_of(row: CsvRow) -> TableRow:
    """Converts a published run to a row of a table of layouts.

    Raises InputError for a model that the planner cannot express.
    """
    model = row.text("model")
    if model not in _MODELS:
        layers = "state-space layers" if model in _STATE_SPACE else "unknown layers"
        raise InputError(model, layers, "attention with an MLP or experts")
    known = preset(_MODELS[model])
    shape = {name: getattr(known, name) for name in _SHAPE}

    def degree(name: str) -> int:
        return 1 if row.text(name) == "n/a" else int(row.text(name))

    gpus = degree("gpus")
    tp = degree("tp")
    gbs = degree("gbs")
    seq = degree("sequence_length")
    return TableRow(
        model,
        gpu=_GPUS[row.text("system")],
        gpus=gpus,
        gbs=gbs,
        mbs=degree("mbs"),
        seq=seq,
        tp=tp,
        pp=degree("pp"),
        cp=degree("cp"),
        interleave=degree("vp"),
        ep=degree("ep"),
        recompute="none",
        sequence_parallel=tp > 1,
        zero=3 if row.text("fsdp") not in ("0", "n/a") else 1,
        stack=STACK,
        precision="bf16",
        fp8_recipe=_RECIPES[row.text("precision")],
        table=model,
        dropout=False,
        attention="flash",
        sec_per_it=gbs * seq / (gpus * float(row.text("tokens_per_sec_per_gpu"))),
        **shape,
    )


def bridge_runs(
    path: Path, times: TimesOf, release: str = RELEASE
) -> tuple[list[Observed], Counter[str]]:
    """Returns the runs of a release that the planner can express, and the number of other runs by
    reason.

    path: CSV file of the runs.
    times: function from a device to its op times.
    """
    runs = []
    refused = Counter[str]()
    for row in CsvFile("planner_bridge", path).rows():
        if row.text("release") != release:
            continue
        try:
            found = row_of(row)
            case = case_of(found)
        except InputError as error:
            refused[str(error)] += 1
            continue
        if not is_possible(case.job, case.layout):
            broken = [one.name for one in strict_violations(case.job, case.layout)]
            refused[f"{found.row_id}: layout that breaks {', '.join(broken)}"] += 1
            continue
        runs.append((case, found.sec_per_it or 0.0, found.table))
    return observe(runs, times), refused


@dataclass(frozen=True)
class Published:
    """Layout that Megatron-Bridge publishes for a training job.

    model: name of a preset.
    gpu: slug of the GPU.
    gbs: global batch size, sequences.
    recipe: key of RECIPES; "" for bf16.
    """

    model: str
    gpu: str
    gpus: int
    gbs: int
    recipe: str
    layout: Layout

    def rank(
        self, times: TimesOf, calibrations: Calibrations
    ) -> tuple[list[Prediction], list[Prediction]]:
        """Searches the layouts of the job; returns their ranking, and the part of it that has the
        published parallel degrees.

        That part begins with the layout of the published micro-batch size and interleaving.
        """
        dtype = RECIPES[self.recipe].forward if self.recipe else "bf16"
        shape = replace(preset(self.model), dtype=dtype, fp8_recipe=self.recipe)
        where = reference_cluster(lookup(self.gpu))
        job = Job(shape, where, self.gpus, self.gbs, dp_overlap=1.0, stack=STACK)
        cp = tuple({1, self.layout.cp})
        space = LayoutSpace(cp=cp, ep=tuple(divisors(shape.experts or 1)), uneven=True)
        found = search(job, times(where.device), calibrations.of(where, STACK), space).ranked
        degrees = attrgetter("tp", "pp", "cp", "ep")
        rest = attrgetter("mbs", "interleave")
        alike = [one for one in found if degrees(one.layout) == degrees(self.layout)]
        alike.sort(key=lambda one: rest(one.layout) != rest(self.layout))
        return list(found), alike


#: The layouts are from Megatron-Bridge's table of 26.04.01, with three exceptions.
#: DeepSeek-V3 on H100: scripts/performance/configs/deepseek,
#: DEEPSEEK_V3_PRETRAIN_CONFIG_H100_FP8_CS_V1.
#: Qwen3-30B on 64 GPUs: perf_recipes/qwen/h100/qwen3_moe.py,
#: qwen3_30b_a3b_pretrain_64gpu_h100_fp8cs_config.
#: Llama 3.1 405B in bf16: scripts/performance/configs/llama,
#: LLAMA31_405B_PRETRAIN_CONFIG_H100_BF16_V2.
PUBLISHED_LAYOUTS = (
    Published(
        "deepseek-v3", "h100-sxm5-80gb", 1024, 8192, "tensorwise", Layout(64, 2, 8, 1, 4, ep=64)
    ),
    Published("deepseek-v3", "gb200-186gb", 256, 4096, "mxfp8", Layout(64, 1, 4, 1, 4, ep=64)),
    Published(
        "qwen3-30b-a3b", "h100-sxm5-80gb", 64, 4096, "tensorwise", Layout(64, 1, 1, 1, ep=16)
    ),
    Published(
        "qwen3-30b-a3b", "h100-sxm5-80gb", 16, 1024, "tensorwise", Layout(16, 1, 1, 1, ep=16)
    ),
    Published("llama-3.1-405b", "h100-sxm5-80gb", 1024, 1536, "", Layout(8, 8, 8, 1, 8, cp=2)),
    Published(
        "llama-3.1-405b", "h100-sxm5-80gb", 1024, 1536, "tensorwise", Layout(8, 8, 8, 1, 8, cp=2)
    ),
)
