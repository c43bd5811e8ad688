"""Fits the latency models that the package ships to public tables: `python -m tools.ship KIND
[NAME…]`.

Each model is judged on rows that its fit has not seen, and its file in quantbench/latency/models
states the errors found. Needs the extra `tables` and the files of `tools.published_tables`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

import numpy as np

from quantbench.device import lookup
from quantbench.latency import attention
from quantbench.latency.attention import AttentionModel
from quantbench.latency.families import family
from quantbench.latency.gemm.cost_model import Machine, Menu, Sizes, hand_prior
from quantbench.latency.gemm.ensemble import Ensemble
from quantbench.latency.gemm.member import Growth as Trees
from quantbench.latency.gemm.member import Member
from quantbench.latency.gemm.model import FOLDER, GemmModel, file_name
from quantbench.latency.gemm.training import (
    POOL_FORMAT,
    POOL_VERSION,
    TABLE_EFFORT,
    TABLE_ROWS,
    Effort,
    MeasuredGpu,
    choose,
)
from quantbench.latency.libraries import SYSTEMS, TABLES, libraries_of, slug_of
from quantbench.latency.moe import Growth, MoEModel, save_models
from quantbench.latency.softmax import SoftmaxModel
from quantbench.workload.dtypes import GEMM_DTYPES
from tools.accuracy.attention import (
    AttentionTable,
    new_sites_and_batches,
    read_attention,
    read_decode,
)
from tools.accuracy.contests import Table, of_groups
from tools.accuracy.moe import MoETable, read_moe
from tools.accuracy.scoring import Split, coverage, random_split, summarize
from tools.accuracy.tables import SHIPPED_GPUS, GemmTable, read_packaged
from tools.published_tables import (
    PUBLISHED,
    SOFTMAX_GPUS,
    SoftmaxTable,
    read_published,
    read_softmax,
)

#: provenance that is stored with a model: its table, and its errors on held-out rows
Found = Mapping[str, Any]
Told = Sequence[tuple[Any, Found]]


@dataclass(frozen=True)
class Kind:
    """Kind of shipped model, with the functions that make it.

    read: function from a name to the tables that are fitted and written together.
    fit: function from a table to its model.
    hold_out: function from a model, its table and all models of the name to the provenance of the
        model, with its errors on held-out rows.
    write: function that writes models, each with its provenance, to files of the package.
    names: names that can be shipped one by one.
    """

    read: Callable[[str], Sequence[Any]]
    fit: Callable[[Any], Any]
    hold_out: Callable[[Any, Any, Sequence[Any]], Found]
    write: Callable[[Told], None]
    names: Sequence[str] = ("all",)


def ship(kind: Kind, name: str) -> None:
    """Reads the tables of one name, fits and judges their models, and writes the models' files."""
    tables = kind.read(name)
    models = list(map(kind.fit, tables))
    # The files must be in place first, because a model may be judged by what other GPUs' models
    # predict for its GPU.
    kind.write([(model, {}) for model in models])
    told = []
    for model, table in zip(models, tables, strict=True):
        told.append((model, kind.hold_out(model, table, models)))
        print(f"{name}: {told[-1][1]}", flush=True)
    kind.write(told)


def _errors(model: Any, test: Table, digits: int) -> dict[str, float]:
    """Returns the errors on the test rows, and the share of times inside the 90 % interval.

    digits: number of decimals of that share.
    """
    predicted = test.ask(model)
    errors = summarize(predicted.latency_us, test.latency_us).rounded()
    covered = coverage(test.latency_us, predicted.low_us, predicted.high_us)
    return {**errors, "coverage": round(covered, digits)}


def _write_json(name: str, data: Mapping[str, Any], **style: Any) -> None:
    (FOLDER / name).write_text(json.dumps(data, **style) + "\n", encoding="utf-8")


# --- products: one model per GPU and dtype, for the default library

_MOST_HELD_OUT = 4000


def _gemm_names() -> list[str]:
    packaged = [pair for pair in product(SYSTEMS, GEMM_DTYPES) if libraries_of(*pair)]
    return list(map(":".join, dict.fromkeys((*packaged, *PUBLISHED))))


def _read_gemm(name: str) -> list[GemmTable]:
    gpu, dtype = name.split(":")
    if (gpu, dtype) in PUBLISHED:
        return [read_published(gpu, dtype)]
    return [read_packaged(gpu, dtype=dtype)]


def _is_large(table: GemmTable) -> bool:
    return len(table) >= 2 * TABLE_ROWS


def _split_gemm(table: GemmTable) -> Split:
    rows = TABLE_ROWS if _is_large(table) else 2 * len(table) // 3
    return random_split(len(table), rows, seed=0)


def _fit_gemm(table: GemmTable) -> GemmModel:
    if _is_large(table):
        table = table.take(_split_gemm(table).train)
    return table.fit("none", effort=TABLE_EFFORT)


def _hold_out_gemm(model: GemmModel, table: GemmTable, _: Any) -> Found:
    """Returns the errors of a model on rows that its fit has not seen.

    A small table is fitted as a whole, so that its model is judged by another fit, to two thirds of
    the rows.
    """
    split = _split_gemm(table)
    judged = model if _is_large(table) else _fit_gemm(table.take(split.train))
    errors = _errors(judged, table.take(split.test[:_MOST_HELD_OUT]), 4)
    words = f"random rows, {errors.pop('rows')} not fitted"
    covered = errors.pop("coverage")
    held_out = {"protocol": words, **errors, "interval_coverage": covered}
    return {**table.provenance, "rows_fitted": model.rows, "held_out": held_out}


def _write_gemm(told: Told) -> None:
    for model, found in told:
        file = FOLDER / file_name(model.device.name, model.dtype, model.library)
        replace(model, provenance={**model.provenance, **found}).save(file)


# --- the pool: parameters of each table, fitted from the hand-written prior alone. Therefore any
# family of GPUs can be left out

_POOL_ROWS = 700
#: tables in the pool, with fp8, so that the fp8 of a GPU can be predicted from that of other GPUs
POOLED = (
    *(f"{slug}:bf16" for slug in SHIPPED_GPUS),
    *(f"{slug}:fp8" for slug in SHIPPED_GPUS if slug != "a100-sxm4-80gb"),
    *map(":".join, PUBLISHED),
)


def _fit_pool(table: GemmTable) -> MeasuredGpu:
    if "batch" in table.sizes:
        # For batched products the libraries take one or two tiles, even if others are faster. The
        # cost model chooses the fastest.
        table = table.take(table.sizes["batch"] == 1)
    rows = random_split(len(table), min(_POOL_ROWS, len(table) - 1), seed=77).train
    one_model = Effort(members=1, rows_first=_POOL_ROWS, growth=Trees(trees=1))
    model = table.take(rows).fit("none", effort=one_model)
    vector = model.ensemble.members[0].parameters[: len(hand_prior()[0])]
    file = table.provenance["table"]
    return MeasuredGpu(table.gpu, family(model.device), table.dtype, vector, len(rows), file, 0.0)


def _hold_out_pool(known: MeasuredGpu, table: GemmTable, pool: Sequence[MeasuredGpu]) -> Found:
    """Returns the error of predictions from other GPU families' parameters alone.

    The error is the 90th percentile of |log(predicted / measured)|.
    """
    device = lookup(known.device)
    start, _ = choose(device, known.dtype, pool, family_out=True)
    ensemble = Ensemble(Machine.of(device, known.dtype), Menu.of(), (Member(start.mean, None),))
    test = table.take(random_split(len(table), min(_MOST_HELD_OUT, len(table) - 1), seed=78).train)
    sizes = {name: size.astype(float) for name, size in test.sizes.items() if name != "layout"}
    error = ensemble.physics(Sizes.of(**sizes)) - np.log(test.latency_us)
    return {"blind_90": round(float(np.quantile(np.abs(error), 0.90)), 4)}


def _write_pool(told: Told) -> None:
    entries = []
    for known, found in told:
        parameters = [round(float(one), 5) for one in known.parameters]
        entries.append({**vars(known), "parameters": parameters, **found})
    data = {"format": POOL_FORMAT, "version": POOL_VERSION, "known": entries}
    _write_json("pool.json", data, indent=1)


# --- attention: prompts and decoding of each GPU, each table with its train and test rows. More
# train rows would make the files larger and predictions slower, and gain little

_PROMPT_ROWS = 800
_DECODE_ROWS = 500
_Parts = Sequence[tuple[AttentionTable, Split]]


def _read_attention(_: str) -> list[_Parts]:
    found: list[_Parts] = []
    for gpu in SHIPPED_GPUS:
        prompts = read_attention(gpu)
        decoding = read_decode(gpu)
        of_prompts = (prompts, of_groups(prompts, _PROMPT_ROWS, 0))
        of_decoding = (decoding, new_sites_and_batches(decoding, _DECODE_ROWS, 0))
        found.append((of_prompts, of_decoding))
    return found


def _fit_attention(parts: _Parts) -> AttentionModel:
    prompts, decoding = (table.take(split.train).fit("auto") for table, split in parts)
    return replace(prompts, decode=decoding.decode)


def _hold_out_attention(model: AttentionModel, parts: _Parts, _: Any) -> Found:
    """Returns the errors for prompts and for decoding, and the spread of times around the prior.

    The prior knows other GPU architectures only. The spread is the 5th and 95th percentile of
    log(measured / prior).
    """
    (prompts, split), (decoding, decode_split) = parts
    blind_us = prompts.ask(prompts.prior()).latency_us
    low, high = np.quantile(np.log(prompts.latency_us / blind_us), (0.05, 0.95)).tolist()
    return {
        "tables": {**prompts.provenance, **decoding.provenance},
        "rows": len(split.train),
        "decode_rows": len(decode_split.train),
        "seed": 0,
        "compute_capability": list(model.device.compute_capability or ()),
        "held_out": _errors(model, prompts.take(split.test), 3),
        "held_out_decode": _errors(model, decoding.take(decode_split.test), 3),
        "transfer": {"log_low": round(low, 3), "log_high": round(high, 3)},
    }


def _write_attention(told: Told) -> None:
    for model, found in told:
        provenance = found or {"transfer": {"log_low": 0.0, "log_high": 0.0}}
        note = model.note
        if found:
            prompts_pct = found["held_out"]["median_pct"]
            decode_pct = found["held_out_decode"]["median_pct"]
            note += (
                f", {prompts_pct:.1f} % off (median) on held-out heads and head_dims"
                f", decoding {decode_pct:.1f} % on held-out heads and batches"
            )
        data = replace(model, note=note, provenance=provenance).to_json()
        _write_json(f"attention-{model.device.name}.json", data, separators=(",", ":"))
    attention.shipped_slugs.cache_clear()
    attention.shipped_json.cache_clear()


# --- experts: one model for the newest table of each GPU and library, one file per dtype

DTYPES = ("bf16", "fp8", "fp8_block", "nvfp4", "mxfp4")
#: boosted trees only, because they take a hundredth of the space of randomised ones
_GROWTH = Growth(randomised=0, boosted=150, depth=5)
_BLIND_ROWS = 2000
#: largest number of rows in a fit; they are drawn at random
_EXPERT_ROWS = 12_000


def _read_moe(_: str) -> list[MoETable]:
    rng = np.random.default_rng(0)
    found = []
    for system, libraries in TABLES.items():
        for library in libraries:
            for dtype, table in read_moe(slug_of(system) or system, library).items():
                if dtype in DTYPES:
                    found.append(table.take(rng.permutation(len(table))[:_EXPERT_ROWS]))
    return found


def _fit_moe(table: MoETable) -> MoEModel:
    fitted = f"fitted to {len(table)} of {table.provenance['rows']} rows"
    note = f"experts of {table.library} {table.version} on {table.gpu}: {fitted}"
    model = table.fit("none", growth=_GROWTH)
    return replace(model, note=note, provenance={"transfer": 0.0})


def _hold_out_moe(model: MoEModel, table: MoETable, models: Sequence[MoEModel]) -> Found:
    """Returns the 90th percentile of |log(measured / prior)|, for a prior from other GPUs' models.

    models: models of all GPUs.
    """
    alike = [one for one in models if one.dtype == model.dtype]
    others = [one for one in alike if one.device.name != model.device.name]
    prior = MoEModel.prior(model.device, dtype=model.dtype, library=model.library, prior=others)
    test = table.take(np.random.default_rng(0).permutation(len(table))[:_BLIND_ROWS])
    error = np.abs(np.log(test.latency_us / test.ask(prior).latency_us))
    return {**table.provenance, "transfer": round(float(np.quantile(error, 0.9)), 3)}


def _write_moe(told: Told) -> None:
    for dtype in DTYPES:
        of = [replace(one, provenance=found) for one, found in told if one.dtype == dtype]
        save_models(FOLDER / f"{dtype}.moe", of)


# --- softmax: a model is fitted to all rows, and judged by another fit to half of them


def _hold_out_softmax(_: SoftmaxModel, table: SoftmaxTable, __: Any) -> Found:
    split = random_split(len(table), len(table) // 2, seed=0)
    errors = _errors(table.take(split.train).fit(), table.take(split.test), 3)
    held_out = {name: errors[name] for name in ("rows", "median_pct", "p95_pct")}
    return {**table.provenance, "held_out": held_out}


def _write_softmax(told: Told) -> None:
    models = {}
    for model, found in told:
        models[model.device.name] = {**model.to_json(), "provenance": found}
    _write_json("softmax.json", {"models": models}, indent=1)


KINDS = {
    "gemm": Kind(_read_gemm, _fit_gemm, _hold_out_gemm, _write_gemm, _gemm_names()),
    "pool": Kind(
        lambda _: [*chain.from_iterable(map(_read_gemm, POOLED))],
        _fit_pool,
        _hold_out_pool,
        _write_pool,
    ),
    "attention": Kind(_read_attention, _fit_attention, _hold_out_attention, _write_attention),
    "moe": Kind(_read_moe, _fit_moe, _hold_out_moe, _write_moe),
    "softmax": Kind(
        lambda _: [*map(read_softmax, SOFTMAX_GPUS)],
        SoftmaxTable.fit,
        _hold_out_softmax,
        _write_softmax,
    ),
}


def main(kind: str, *names: str) -> None:
    """Ships the models of some names, or of all.

    A name of gemm is <device>:<dtype>, and takes half a minute on one idle core.
    """
    for name in names or KINDS[kind].names:
        ship(KINDS[kind], name)


if __name__ == "__main__":
    main(*sys.argv[1:])
