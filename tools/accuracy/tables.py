"""Reads the measured GEMM tables of aiconfigurator-core (extra `tables`) that shipped models were
fitted to.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantbench.importers.aiconfigurator import find_tables
from quantbench.importers.runs import digest
from quantbench.latency.libraries import default_library, libraries_of, slug_of, system_of
from quantbench.latency.tables import GemmTable, read_columns, read_table

#: devices whose default tables the shipped models were fitted to and docs/accuracy.md evaluates. No
#: other bf16 table influenced a design choice, so the others are unseen test data.
SHIPPED_GPUS = ("a100-sxm4-80gb", "b200-sxm-180gb", "h100-sxm5-80gb", "h200-sxm-141gb", "l40s-48gb")
# Spelling in tables → the framework's own.
_SPELLED = {"VLLM": "vLLM"}


@dataclass(frozen=True, kw_only=True)
class PackagedTable(GemmTable):
    """Table with its origin. file: path below the package's data folder. sha256: digest of the
    file. device: GPU name in the table."""

    file: str
    sha256: str
    package: str
    system: str
    framework: str
    version: str
    device: str


def read_packaged(system: str, *, dtype: str = "bf16", library: str = "") -> PackagedTable:
    """Reads the newest table of a system (aiconfigurator's name or device slug) and library ("":
    `default_library`).

    Raises UnsupportedError without the package, InputError for a system, library or dtype without a
    table.
    """
    slug = slug_of(system_of(system)) or system
    library = library or (default_library(slug, dtype) if libraries_of(slug, dtype) else "")
    (found,), _ = find_tables(system, backend=library or None, kinds=["gemm"])
    table = read_table(found.path, slug, dtype=dtype, library=found.backend)
    columns = read_columns(found.path, dtype)

    def text(name: str) -> str:
        names = sorted(set(columns[name].astype(str)))
        return ", ".join(_SPELLED.get(name, name) for name in names)

    return PackagedTable(
        **vars(table),
        file=found.shown,
        sha256=digest(found.path),
        package=found.package,
        system=found.system,
        framework=text("framework"),
        version=text("version"),
        device=text("device"),
    )
