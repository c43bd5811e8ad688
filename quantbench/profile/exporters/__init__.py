"""Exports a profile to the formats of planners and simulators.

Entry points: `export_profile`, `FORMATS`. Used by the command `profile`. Each format is a module of this package,
imported when it is asked for.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from quantbench.errors import InputError, StoreError, require_choice
from quantbench.profile.exporters.options import WHO, Exported, ExportOptions

if TYPE_CHECKING:
    from quantbench.profile.profile import Profile

#: format → (module of this package, function)
_FORMATS = {
    "aiconfigurator": ("aiconfigurator", "export"),
    "vidur": ("vidur", "export"),
    "llm-analysis": ("llm_analysis", "export"),
    "calculon": ("calculon", "export"),
    "csv": ("flat", "export_csv"),
    "parquet": ("flat", "export_parquet"),
}
FORMATS = tuple(_FORMATS)


def export_profile(profile: Profile, name: str, folder: Path, options: ExportOptions | None = None) -> Exported:
    """Writes `profile` to `folder` in the format `name`, replacing files of an earlier export.

    Raises InputError or UnsupportedError if the format cannot represent the profile or an option is invalid,
    StoreError if the folder cannot be written.
    """
    module, function = _FORMATS[require_choice(WHO, "--format", name, FORMATS)]
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise StoreError(WHO, f"{folder} is a file", "a folder to write into")
    out, options = Exported(folder), options or ExportOptions()
    providers = sorted({name for table in profile.tables.values() for name in table["provider"].tolist()})
    if options.provider and options.provider not in providers:
        expected = "one of " + ", ".join(providers) if providers else "a profile with rows"
        raise InputError(WHO, f"--provider {options.provider}: no row has this provider", expected)
    getattr(import_module(f"{__name__}.{module}"), function)(profile, options, out)
    return out
