"""Exports the profile's tables as CSV or Parquet files, one per kind, with unchanged columns and
units.
"""

from __future__ import annotations

from collections.abc import Callable

from quantbench.errors import InputError
from quantbench.profile.exporters.options import WHO, Exported, ExportOptions, csv_text
from quantbench.profile.file import to_parquet
from quantbench.profile.profile import Profile
from quantbench.profile.table import Table

#: columns that `quantbench import csv` names differently, and columns that it does not read
_MAPPED = {"latency_us": "latency=latency_us:us"}
_UNMAPPED = ("low_us", "high_us", "grade", "origin", "block_m", "block_n", "split_k")


def export_csv(profile: Profile, options: ExportOptions, out: Exported) -> None:
    """Writes `<kind>.csv` for every kind with rows. Numbers round-trip exactly."""
    _export(profile, out, "csv", lambda table: csv_text(table.rows()))
    if profile.device.kind == "cpu":  # `import csv` knows GPUs only
        return
    for kind in (kind for kind in out.rows if kind != "moe"):  # `import csv` reads no experts
        names = [name for name in profile.tables[kind].columns if name not in _UNMAPPED]
        mapped = ",".join(_MAPPED.get(name, f"{name}={name}") for name in names)
        out.use.append(
            f"quantbench import csv {out.folder / kind}.csv --gpu {profile.device.name} --map {mapped}"
        )


def export_parquet(profile: Profile, options: ExportOptions, out: Exported) -> None:
    """Writes `<kind>.parquet` for every kind with rows."""
    _export(profile, out, "parquet", to_parquet)
    out.use.append(f"pandas.read_parquet('{out.paths[0]}')")


def _export(
    profile: Profile, out: Exported, suffix: str, content: Callable[[Table], str | bytes]
) -> None:
    for kind, table in profile.tables.items():
        if len(table):
            out.write(content(table), f"{kind}.{suffix}")
            out.rows[kind] = len(table)
    if not out.rows:
        raise InputError(
            WHO, f"a profile without rows as {suffix}", "rows, or a format that can be modelled"
        )
