"""What an accuracy table was made from: which measured rows, which software, which processor."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

from quantbench.device.cpu_info import cpu_info
from quantbench.latency.tables import GemmTable
from quantbench.validate.attention_data import AttentionTable

_PACKAGES = ("quantbench", "numpy", "scipy", "scikit-learn")


def gemm_origins(tables: Iterable[tuple[str, GemmTable]]) -> list[str]:
    """A line for each device's table, and one on what ran."""
    lines = []
    for gpu, table in tables:
        of = table.provenance
        package = f"{of.package}: " if of.package else ""
        what = f"{package}{of.file} ({of.framework} {of.version}, sha256 {of.sha256[:12]})"
        lines.append(f"{gpu}: {len(table):,} rows of {table.dtype} from {what}")
    return [*dict.fromkeys(lines), _made_with()]


def attention_origins(tables: Iterable[tuple[str, AttentionTable]]) -> list[str]:
    """A line for each device's tables, and one on what ran."""
    lines = []
    for gpu, table in tables:
        parts = [
            f"{source}, {of['rows']:,} rows of {of['provider']}, sha256 {str(of['sha256'])[:12]}"
            for source, of in table.sources.items()
        ]
        lines.append(f"{gpu}: {'; '.join(parts)}")
    return [*lines, _made_with()]


def _made_with() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return f"Made with {packages}; times on one core of {cpu_info().name}"
