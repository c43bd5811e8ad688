"""The measured tables that the guide rests on, imported as runs and read back as points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from quantbench.analysis.summary import Point, points_of
from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.importers import aiconfigurator
from quantbench.importers.runs import write_run
from quantbench.store.folder import Run, read_run

#: the GPUs of the guide, with their names in its tables
GPUS = {
    "a100-sxm4-80gb": "A100",
    "h100-sxm5-80gb": "H100",
    "h200-sxm-141gb": "H200",
    "b200-sxm-180gb": "B200",
}
#: of every figure of the guide
DTYPE = "bf16"


@dataclass(frozen=True)
class Evidence:
    """What is known of one GPU. gemm, attention: its imported runs; points of them. sources: table and version."""

    name: str
    spec: DeviceSpec
    gemm_run: Run
    gemm: tuple[Point, ...]
    attention: tuple[Point, ...]
    sources: tuple[str, ...]


def evidence() -> Iterator[Evidence]:
    """One GPU at a time: a table of 36,000 rows is read, used and let go. Needs the extra `quantbench[tables]`."""
    for slug, name in GPUS.items():
        spec = lookup(slug)
        with TemporaryDirectory() as folder:
            gemm = gemm_table(slug, Path(folder))
            attention = _import(slug, spec, "context_attention", Path(folder))
        yield Evidence(
            name, spec, gemm, points_of(gemm.records, spec), points_of(attention.records, spec),
            (gemm.info.source, attention.info.source),
        )  # fmt: skip


def gemm_table(slug: str, folder: Path) -> Run:
    """The table of products of one GPU, imported into `folder`. Raises UnsupportedError without the extra `tables`."""
    return _import(slug, lookup(slug), "gemm", folder)


def _import(slug: str, spec: DeviceSpec, kind: str, folder: Path) -> Run:
    (table,), _ = aiconfigurator.find_tables(slug, kinds=(kind,))
    rows = aiconfigurator.read_rows(table, dtypes=(DTYPE,))
    return read_run(write_run(folder, spec, aiconfigurator.origin_of(table), rows).folder)


def sources_caption(sources: Mapping[str, str], dtype: str) -> str:
    """What a picture of several GPUs names: `bf16 · A100, H100: sglang 0.5.10 · imported from aiconfigurator-core`.

    sources: by GPU, each as `package: table (library)`.

    >>> sources_caption({"A100": "pack 1: a/b (sglang 0.5)", "H100": "pack 1: c/d (sglang 0.5)"}, "bf16")
    'bf16 · A100, H100: sglang 0.5 · imported from pack 1'
    """
    libraries: dict[str, list[str]] = {}
    for gpu, source in sources.items():
        libraries.setdefault(source.rpartition("(")[2].rstrip(")"), []).append(gpu)
    packages = ", ".join(dict.fromkeys(source.partition(":")[0] for source in sources.values()))
    ran = "; ".join(f"{', '.join(gpus)}: {library}" for library, gpus in libraries.items())
    return f"{dtype} · {ran} · imported from {packages}"
