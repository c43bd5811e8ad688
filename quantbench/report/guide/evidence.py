"""The measured tables that the guide rests on, imported as runs and read back as points."""

from __future__ import annotations

from collections.abc import Iterator
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
_DTYPE = "bf16"


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
            gemm = _import(slug, spec, "gemm", Path(folder))
            attention = _import(slug, spec, "context_attention", Path(folder))
        yield Evidence(
            name, spec, gemm, points_of(gemm.records, spec), points_of(attention.records, spec),
            (gemm.info.source, attention.info.source),
        )  # fmt: skip


def _import(slug: str, spec: DeviceSpec, kind: str, folder: Path) -> Run:
    (table,), _ = aiconfigurator.find_tables(slug, kinds=(kind,))
    rows = aiconfigurator.read_rows(table, dtypes=(_DTYPE,))
    return read_run(write_run(folder, spec, aiconfigurator.origin_of(table), rows).folder)
