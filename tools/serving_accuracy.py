"""Compares serving times that aiconfigurator predicts from its own tables with those that it
predicts from tables exported by quantbench.

An exported table is filled by models fitted to 200 rows of the package's table, with priors that
know no other table of the GPU's generation. The measured times come from the package too
(silicon_sample.csv, mode agg). Run it as `python -m tools.serving_accuracy serving WORK.jsonl
docs/exporting.md`, where WORK.jsonl keeps finished results.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import nan
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from quantbench.device import lookup
from quantbench.errors import QuantbenchError
from quantbench.importers import aiconfigurator
from quantbench.latency.attention import AttentionModel
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.libraries import TABLES, slug_of
from quantbench.latency.moe import MoEModel
from quantbench.profile import Profile
from quantbench.profile.exporters import export_profile
from quantbench.profile.exporters.aiconfigurator import FEW_TOKENS
from quantbench.profile.exporters.options import ExportOptions
from quantbench.profile.models import Models
from quantbench.profile.schema import Provenance
from quantbench.profile.table import LAYOUTS, Table
from quantbench.workload.huggingface import describe
from tools.accuracy.formats import append_entry, entries
from tools.guide.markers import table as markdown
from tools.guide.markers import write_between

_FORMATS = ("bf16", "fp8", "fp8_block", "nvfp4")
#: model in the sample → name of its configuration in the package, where the two differ
_FILES = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai/DeepSeek-R1",
}
_DENSE = ("Llama-3", "Qwen3-32B")
_DENSE_SYSTEMS = ("h100_sxm", "h200_sxm", "b200_sxm")
#: (system, library) → version of the table of experts that the planner takes for most models
_EXPERTS = {(system, "vllm"): "0.19.0" for system in ("b200_sxm", "h200_sxm")}
#: share of the attention rows that are drawn from decoding. The time per token depends on it most.
_DECODING = 0.7
#: section of the page → the package's own tables, and the seeds that draw the rows of exported
#: tables. Models with experts take long, so they have one seed.
_SECTIONS = {"serving": ("own", "0", "1"), "experts": ("own", "0")}
#: number of rows that are drawn from each table
_ROWS = 200

#: predicted over measured times by (system, backend, seed)
Ratios = dict[tuple[str, ...], list[float]]
Row = Any  # named tuple with one row of the sample


def package() -> Path:
    """Returns the folder of the package aiconfigurator-core, which must be installed."""
    systems = aiconfigurator.systems_folder()
    assert systems is not None
    return systems.parent


def sample(*, experts: bool) -> dict[tuple[str, str], list[Row]]:
    """Returns the rows of dense models, or of models with experts, by (system, backend)."""
    import pandas

    frame = pandas.read_csv(package() / "systems" / "silicon_sample.csv")
    frame = frame[frame["mode"] == "agg"]
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in frame.astype(object).where(frame.notna(), None).itertuples():
        is_dense = any(name in row.model_path for name in _DENSE)
        if is_dense != experts and (experts or row.system in _DENSE_SYSTEMS):
            found[row.system, row.backend].append(row)
    return found


def file_of(row: Row) -> str:
    return _FILES.get(row.model_path, str(row.model_path))


def tpot_ms(row: Row, database: Any, attention: str | None) -> float:
    """Returns the time per output token that aiconfigurator predicts for a row, milliseconds.

    database: tables that it predicts from.
    attention: dtype of the attention over prompts; None for that of the checkpoint.
    """
    from aiconfigurator_core.sdk import config
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.config_builders import build_model_config
    from aiconfigurator_core.sdk.models import get_model

    names = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    sizes = {name: int(getattr(row, name) or 1) for name in names}
    modes = {name: getattr(row, name) for name in ("gemm_quant_mode", "moe_quant_mode")}
    model = get_model(
        file_of(row), build_model_config(**sizes, **modes, fmha_quant_mode=attention), row.backend
    )
    isl = int(row.isl)
    asked = config.RuntimeConfig(batch_size=int(row.batch_size), isl=isl, osl=int(row.osl))
    found = get_backend(row.backend).run_agg(model, database, asked, ctx_tokens=isl)
    return float(found.get_result_dict()["tpot"])


def few_rows(
    kind: str, system: str, library: str, seed: int, count: int, of: str = ""
) -> list[Any]:
    """Returns at most `count` random rows of each dtype of a table.

    kind: kind of table, such as gemm or moe.
    of: provider of all rows; "" for the provider with the most rows of each dtype.
    """
    version = _EXPERTS.get((system, library)) if kind == "moe" else None
    tables, _ = aiconfigurator.find_tables(system, backend=library, version=version, kinds=[kind])
    by_dtype: dict[str, list[Any]] = defaultdict(list)
    for row in aiconfigurator.read_rows(tables[0]).rows:
        if of in ("", row.provider):
            by_dtype[row.workload.dtype].append(row)
    found = []
    for rows in by_dtype.values():
        provider = Counter(row.provider for row in rows).most_common(1)[0][0]
        alike = list({row.workload: row for row in rows if row.provider == provider}.values())
        order = np.random.default_rng(seed).permutation(len(alike))
        found += [alike[i] for i in order[:count]]
    return found


def _columns(rows: Sequence[Any]) -> tuple[list[Any], list[float]]:
    """Returns the workloads and the times of rows, microseconds."""
    return [row.workload for row in rows], [row.latency_us for row in rows]


def table_of(kind: str, rows: Sequence[Any]) -> Table:
    layout = LAYOUTS[kind]
    values = []
    for row in rows:
        found = {key: getattr(row.workload, key, row.provider) for key in layout.keys}
        found |= dict.fromkeys(("latency_us", "low_us", "high_us"), row.latency_us)
        found |= {"grade": "C", "origin": "imported", "kernel": ""}
        values.append([found.get(name, 0) for name in layout.names])
    values.sort(key=lambda row: row[: len(layout.keys)])
    return Table.of(kind, dict(zip(layout.names, zip(*values, strict=True), strict=True)))


def profile_of(system: str, library: str, seed: int, *, experts: bool) -> Profile:
    """Returns a profile of few random rows of each of an engine's tables.

    experts: whether to include layers of experts.
    """
    decoding = int(_DECODING * _ROWS)
    counts = {"context_attention": _ROWS - decoding, "generation_attention": decoding}
    rows = few_rows("gemm", system, library, seed, _ROWS)
    for kind, count in counts.items():
        drawn = few_rows(kind, system, library, seed, count)
        rows += [row for row in drawn if row.workload.dtype == "bf16"]
    for provider in ("", FEW_TOKENS) if experts else ():
        rows += few_rows("moe", system, library, seed, _ROWS, provider)
    return profile_with(rows, system, library, seed)


def profile_with(rows: Sequence[Any], system: str, library: str, seed: int) -> Profile:
    """Returns a profile with rows of an engine's tables, and models fitted to them.

    The priors of the models know no other table of the GPU's generation.
    """
    device = lookup(slug_of(system) or system)
    known: dict[str, Any] = {"prior": "family-out", "seed": seed}
    of_kind: dict[str, list[Any]] = defaultdict(list)
    of_model: dict[tuple[str, str, str], list[Any]] = defaultdict(list)
    for row in rows:
        kind = row.workload.kind
        of_kind[kind].append(row)
        of_model[kind, row.workload.dtype, row.provider if kind == "moe" else ""].append(row)
    products = []
    models = {}
    for (kind, dtype, provider), alike in of_model.items():
        works, us = _columns(alike)
        if kind == "moe":
            models[dtype, provider] = MoEModel.fit(device, works, us, library=library, **known)
        elif kind == "gemm" and dtype in _FORMATS:
            m, n, k = np.transpose(list(map(attrgetter("m", "n", "k"), works)))
            products.append(
                GemmModel.fit(
                    device, m, n, k, us, layout="nt", dtype=dtype, library=library, **known
                )
            )
    works, us = _columns(of_kind["attention"])
    attention = AttentionModel.fit(
        device, works, us, cache_write=[work.causal for work in works], **known
    )
    tables = {kind: table_of(kind, alike) for kind, alike in of_kind.items()}
    shipped = Models(tuple(products), attention=attention)
    profile = Profile(device, {}, Provenance("tools"), tables, shipped)
    profile._experts._models.update(models)
    return profile


def predictions(rows: Sequence[Row], system: str, root: Path | None) -> list[float]:
    """Returns predicted over measured time per output token of each row, nan without a prediction.

    root: folder with the tables to predict from; None for the package's own.
    """
    from aiconfigurator_core.sdk import perf_database

    backend = rows[0].backend
    where = {"systems_paths": str(root), "shared_layer": False} if root else {}
    database = perf_database.get_database(system, backend, TABLES[system][backend], **where)
    found = []
    for row in rows:
        for attention in (None, "bfloat16"):  # FP8 is not in every table
            try:
                found.append(tpot_ms(row, database, attention) / row.silicon_tpot_ms)
                break
            except Exception as error:  # noqa: BLE001 - no data, no such model, a bad degree
                reason = f"{row.model_path} {backend}: {type(error).__name__} {str(error)[:150]}"
        else:
            found.append(nan)
            reasons[reason] += 1
    return found


#: number of rows without a prediction, by reason
reasons: Counter[str] = Counter()


def exported(rows: Sequence[Row], system: str, seed: str, *, experts: bool) -> list[float]:
    """Returns `predictions` from tables that are exported from few rows.

    seed: seed that draws the rows; "own" to predict from the package's tables instead.
    """
    if seed == "own":
        return predictions(rows, system, None)
    backend = rows[0].backend
    profile = profile_of(system, backend, int(seed), experts=experts)
    files = []
    for name in sorted(set(map(file_of, rows))):
        file = package() / "model_configs" / f"{name.replace('/', '--')}_config.json"
        try:
            describe(file, hybrid=True)
            files.append(file)
        except QuantbenchError as error:
            reasons[str(error)] += 1
    with TemporaryDirectory() as folder:
        version = TABLES[system][backend]
        asked = ExportOptions(backend=backend, version=version, configs=tuple(files))
        export_profile(profile, "aiconfigurator", Path(folder), asked)
        return predictions(rows, system, Path(folder))


def judge(work: Path, tables: Sequence[str], *, experts: bool) -> Ratios:
    """Appends predicted over measured times to the JSON lines in `work`, unless they are there.

    Returns all ratios. Each line has those of one engine, predicted from the package's own tables
    or from tables exported with one seed.
    """
    done = {tuple(entry["key"]): entry["ratios"] for entry in entries(work)}
    for (system, backend), rows in sample(experts=experts).items():
        for seed in tables:
            key = (system, backend, seed)
            if key not in done:
                done[key] = exported(rows, system, seed, experts=experts)
                append_entry(work, {"key": key, "ratios": done[key]})
    return done


def lines(done: Ratios, tables: Sequence[str]) -> Iterator[list[str]]:
    """Yields the lines of the page's table: for each engine, each backend and all together, the
    number of predicted rows and the errors with each table.

    The errors are over the rows that are predicted with every table.
    """
    found: dict[str, list[Any]] = defaultdict(list)
    for system, backend in sorted({key[:2] for key in done}):
        ratios = [done[system, backend, seed] for seed in tables]
        for name in ("all", backend, f"{system} {backend}"):
            found[name].append(ratios)
    for name, ratios in sorted(found.items()):
        errors = 100 * np.abs(np.concatenate(ratios, axis=1) - 1)
        both = errors[:, ~np.isnan(errors).any(axis=0)]
        if not both.size:
            continue
        cells = [f"{np.median(one):.1f} / {np.percentile(one, 95):.1f}" for one in both]
        yield [name, *map(str, (~np.isnan(errors)).sum(axis=1)), *cells]


def main(section: str, work: Path, page: Path) -> None:
    """Writes the table of a section into a page, and prints why rows have no prediction.

    section: serving (dense models) or experts.
    work: file of the results so far, JSON lines.
    """
    logging.disable(logging.CRITICAL)
    tables = _SECTIONS[section]
    found = judge(work, tables, experts=section == "experts")
    names = ["own", *(f"seed {seed}" for seed in tables[1:])]
    head = ["engine", *(f"rows, {name}" for name in names), *names]
    write_between(page, section, markdown(head, lines(found, tables)))
    print(*reasons.most_common(), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
