"""Plans as plain objects for programs: layouts, rules, rows, and everything that is needed to make them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from quantbench.planner.calibration import Calibration
from quantbench.planner.folklore import Judged
from quantbench.planner.layout import Job
from quantbench.planner.memory import GIB
from quantbench.planner.predict import Prediction
from quantbench.planner.shape_search import ShapeFound
from quantbench.store.environment import installed_versions, relevant_environment

PLAN_FORMAT = "quantbench-plan"
PLAN_VERSION = 1


def provenance(arguments: Sequence[str]) -> dict[str, Any]:
    """What was asked, with which versions and under which variables. arguments: the command line."""
    return {
        "format": PLAN_FORMAT,
        "version": PLAN_VERSION,
        "command": list(arguments),
        "software": installed_versions(),
        "environment": relevant_environment(),
    }


def job_to_json(job: Job, calibration: Calibration, times_note: str, assumed: Sequence[str] = ()) -> dict[str, Any]:
    """What was planned for: the model, the topology, the constants and where the operations' times come from."""
    where = job.cluster
    return {
        "shape": asdict(job.shape),
        "gpus": job.gpus,
        "gbs": job.gbs,
        "optimizer": job.optimizer,
        "dp_overlap": job.dp_overlap,
        "rampup_step": job.rampup_step,
        "topology": {
            "cluster": where.name, "device": where.device.name, "gpus_per_node": where.gpus_per_node,
            "nodes": -(-job.gpus // where.gpus_per_node), "node_gb_per_s": where.node_gb_per_s, "source": where.source,
        },
        "calibration": asdict(calibration),
        "op_times": times_note,
        "assumed": list(assumed),
    }  # fmt: skip


def prediction_to_json(found: Prediction) -> dict[str, Any]:
    """One layout: times in seconds, memory in GiB."""
    memory = {name: value / GIB for name, value in asdict(found.memory).items() if name != "stage"}
    return {
        "layout": asdict(found.layout),
        "sec_per_it": found.sec_per_it,
        "sec_per_it_low": found.iteration.sec.low,
        "sec_per_it_high": found.iteration.sec.high,
        "tflops": found.tflops,
        "mfu": found.mfu,
        "tokens_per_s": found.tokens_per_s,
        "mem_gb": found.memory.total_gib,
        "fits": found.fits,
        "bubble_share": found.iteration.bubble_share,
        "bound": found.iteration.bound,
        "seconds": found.iteration.parts,
        "memory_gib": memory,
        "fullest_stage": found.memory.stage,
    }


def judged_to_json(judged: Judged) -> dict[str, Any]:
    """One rule of thumb and its verdict."""
    return {
        **asdict(judged.rule),
        "verdict": judged.verdict,
        "finding": judged.finding,
        "cost": judged.cost,
        "choice": None if judged.choice is None else asdict(judged.choice.layout),
    }


def shape_to_json(found: ShapeFound) -> dict[str, Any]:
    """One shape of a shape search."""
    return {
        "shape": asdict(found.shape),
        "parameters": found.parameters,
        "scaled_sec_per_it": found.scaled_s,
        **prediction_to_json(found.best),
    }
