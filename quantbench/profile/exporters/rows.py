"""Which of a profile's rows an export takes: one figure per shape, of one provider and one layout."""

from __future__ import annotations

import numpy as np

from quantbench.errors import InputError
from quantbench.profile.exporters.options import WHO, Exported, ExportOptions
from quantbench.profile.profile import Profile
from quantbench.profile.table import Table

#: a linear layer's layout, which is what planners ask for; the others follow for want of it
_LAYOUTS = ("nt", "nn", "tn")


def check_provider(profile: Profile, options: ExportOptions) -> None:
    """Raise InputError for a provider of no row at all."""
    names = sorted({name for table in profile.tables.values() for name in table["provider"].tolist()})
    if options.provider and options.provider not in names:
        expected = "one of " + ", ".join(names) if names else "a profile with rows"
        raise InputError(WHO, f"--provider {options.provider}: no row is its", expected)


def products(profile: Profile, options: ExportOptions, out: Exported) -> Table:
    """Unbatched products of one provider, layout and dtype; what is not taken is counted."""
    table = _keep(profile.tables["gemm"], "batch", 1, "a batched product: no place for it there", out)
    table = _of_dtype(table, options, out)
    if not len(table):
        return table
    if options.layout and options.layout not in table["layout"]:
        there = ", ".join(sorted(set(table["layout"].tolist())))
        raise InputError(WHO, f"--layout {options.layout}: no product is of it", f"one of {there}")
    layout = options.layout or next(name for name in _LAYOUTS if (table["layout"] == name).any())
    if layout != "nt":
        out.notes.append(f"products are of layout {layout}, where consumers mean linear layers (nt)")
    table = _keep(table, "layout", layout, f"a product of another layout than {layout}", out)
    return _of_provider(table, options, out)


def attentions(profile: Profile, options: ExportOptions, out: Exported) -> Table:
    """Forward attention of one provider and dtype; what is not taken is counted."""
    table = _keep(profile.tables["attention"], "direction", "forward", "a backward pass: no place for it there", out)
    return _of_provider(_of_dtype(table, options, out), options, out)


def collectives(profile: Profile, out: Exported) -> Table:
    """Collectives of the provider with the most rows."""
    return _of_provider(profile.tables["collective"], ExportOptions(), out)


def dtype_of(profile: Profile, options: ExportOptions) -> str:
    """The number format that is exported: the one asked for, else what most products or attention rows are of, else
    bf16 where the device has it."""
    if options.dtype:
        return options.dtype
    for kind in ("gemm", "attention", "softmax"):
        found = _most(profile.tables[kind]["dtype"])
        if found:
            return found
    return "fp16" if profile.device.peak("bf16") is None else "bf16"


def _of_dtype(table: Table, options: ExportOptions, out: Exported) -> Table:
    if not options.dtype:
        return table
    return _keep(table, "dtype", options.dtype, f"another dtype than {options.dtype}", out)


def _of_provider(table: Table, options: ExportOptions, out: Exported) -> Table:
    if not len(table):
        return table
    names = sorted(set(table["provider"].tolist()))
    # A provider of products need not be one of attention.
    wanted = options.provider if options.provider in names else _most(table["provider"])
    if len(names) > 1:
        out.notes.append(f"{table.kind}: the figures are {wanted}'s; there are others by " + ", ".join(
            name for name in names if name != wanted))  # fmt: skip
    return _keep(table, "provider", wanted, f"of another provider than {wanted}", out)


def _keep(table: Table, column: str, value: object, reason: str, out: Exported) -> Table:
    kept = table[column] == value
    if not len(table) or kept.all():
        return table
    out.leave_out(reason, int((~kept).sum()))
    return table.where(np.asarray(kept, dtype=np.bool_))


def _most(values: np.typing.NDArray[np.str_]) -> str:
    """The most frequent text, the first in the alphabet of equals; "" of none."""
    if not len(values):
        return ""
    names, counts = np.unique(values, return_counts=True)
    return str(names[int(np.argmax(counts))])
