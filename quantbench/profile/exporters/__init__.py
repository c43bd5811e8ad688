"""Exports a profile to the formats of planners and simulators.

`export_profile` is the entry point. Each format has a module in this package, which is imported
only if the format is requested.
"""

from __future__ import annotations

import os
from dataclasses import fields
from importlib import import_module
from pathlib import Path

from quantbench.errors import InputError, StoreError, require_choice
from quantbench.profile.exporters.options import WHO, Exported, ExportOptions
from quantbench.profile.profile import Profile

_ROWS = ("provider", "dtype", "layout")
_MODELS = ("model", "configs", "tensor_parallel")
#: Maps a format to its module in this package, the module's export function, and the names of the
#: ExportOptions that the function reads.
_FORMATS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "aiconfigurator": (
        "aiconfigurator",
        "export",
        (*_ROWS, "backend", "version", "library", *_MODELS),
    ),
    "vidur": ("vidur", "export", (*_ROWS, "model", "tensor_parallel")),
    "llm-analysis": ("llm_analysis", "export", _ROWS),
    "calculon": ("calculon", "export", _ROWS),
    "csv": ("flat", "export_csv", ("dtype", "library", "grid", *_MODELS)),
    "parquet": ("flat", "export_parquet", ("dtype", "library", "grid", *_MODELS)),
}
_TYPED = {"version": "as-version", "tensor_parallel": "tp", "configs": "config"}
FORMATS = tuple(_FORMATS)


def export_profile(
    profile: Profile, name: str, folder: Path, options: ExportOptions | None = None
) -> Exported:
    """Writes a profile to `folder` in the format `name`, and a file notes.txt.

    notes.txt has the sources and assumptions behind the numbers. Files of an earlier export are
    replaced.

    Raises InputError or UnsupportedError if the format cannot represent the profile or an option is
    invalid, and StoreError if the folder cannot be written.
    """
    module, function, reads = _FORMATS[require_choice(WHO, "--format", name, FORMATS)]
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise StoreError(WHO, f"{folder} is a file", "a folder to write into")
    out = Exported(folder)
    options = options or ExportOptions()
    providers: set[str] = set()
    for table in profile.tables.values():
        providers.update(table["provider"].tolist())
    if options.provider and options.provider not in providers:
        expected = "a profile with rows"
        if providers:
            expected = f"one of {', '.join(sorted(providers))}"
        raise InputError(WHO, f"--provider {options.provider}: no row has this provider", expected)
    for one in fields(options):
        if one.name not in reads and getattr(options, one.name) != one.default:
            typed = [f"--{_TYPED.get(word, word)}" for word in (one.name, *reads)]
            what = f"{typed[0]} with --format {name}"
            raise InputError(WHO, what, f"its options: {', '.join(typed[1:])}")
    getattr(import_module(f"{__name__}.{module}"), function)(profile, options, out)
    notes = out.notes or ["every row is a row of the profile"]
    out.write("\n".join([*notes, ""]), "notes.txt")
    return out
