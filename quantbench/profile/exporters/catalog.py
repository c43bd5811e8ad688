"""The formats that a profile can be exported to, by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from quantbench.errors import StoreError, require_choice
from quantbench.profile.exporters.options import WHO, Exported, ExportOptions
from quantbench.profile.exporters.rows import check_provider
from quantbench.profile.profile import Profile

#: format → (module beside this one, function)
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
    """Write `profile` into `folder` in a consumer's format, over what an earlier export left there.

    Raises InputError or UnsupportedError for what the format or the profile does not allow, StoreError for a folder
    that cannot be written.
    """
    module, function = _FORMATS[require_choice(WHO, "--format", name, FORMATS)]
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise StoreError(WHO, f"{folder} is a file", "a folder to write into")
    write: Callable[[Profile, ExportOptions, Exported], None] = getattr(
        import_module(f"quantbench.profile.exporters.{module}"), function
    )
    out, options = Exported(folder), options or ExportOptions()
    check_provider(profile, options)
    write(profile, options, out)
    return out
