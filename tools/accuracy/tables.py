"""Reads the measured GEMM tables of aiconfigurator-core (extra `tables`), which the shipped models were fitted to.

Entry point: `read_packaged`. Used by `gemm`, `cliff_calibration`, `page` and tools/ship_gemm.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from quantbench.files import read_bytes
from quantbench.importers.aiconfigurator import find_tables
from quantbench.latency.tables import GemmTable, read_columns, read_table, slug_of

#: devices whose default tables the shipped models were fitted to and docs/accuracy.md evaluates. No other bf16 table
#: influenced a design choice, so the others are unseen test data.
SHIPPED_GPUS = ("a100-sxm4-80gb", "b200-sxm-180gb", "h100-sxm5-80gb", "h200-sxm-141gb", "l40s-48gb")
# Spelling in tables → the framework's own.
_SPELLED = {"VLLM": "vLLM"}


@dataclass(frozen=True)
class PackagedTable(GemmTable):
    """Table with its origin. file: path below the package's data folder. sha256: digest of the file. device: GPU name
    in the table."""

    file: str
    sha256: str
    package: str
    system: str
    framework: str
    version: str
    device: str


def read_packaged(system: str, *, dtype: str = "bf16") -> PackagedTable:
    """Reads the default table of a system (aiconfigurator's name or device slug).

    Raises UnsupportedError without the package, InputError for a system or dtype without a table.
    """
    (found,), _ = find_tables(system, kinds=["gemm"])
    table = read_table(found.path, slug_of(found.system) or found.system, dtype=dtype)
    columns = read_columns(found.path, dtype)

    def text(name: str) -> str:
        names = sorted(set(columns[name].astype(str)))
        return ", ".join(_SPELLED.get(name, name) for name in names)

    return PackagedTable(
        **vars(table), file=found.shown, sha256=hashlib.sha256(read_bytes(found.path)).hexdigest(),
        package=found.package, system=found.system, framework=text("framework"), version=text("version"),
        device=text("device"),
    )  # fmt: skip
