"""Workloads as JSON objects: `kind` and the fields, as records store them."""

from dataclasses import fields
from sys import intern
from typing import Any

from quantbench.errors import InputError
from quantbench.workload.attention import Attention
from quantbench.workload.collective import Collective
from quantbench.workload.gemm import Gemm
from quantbench.workload.softmax import Softmax
from quantbench.workload.transformer import Workload

_KINDS: dict[str, type[Workload]] = {
    "gemm": Gemm,
    "softmax": Softmax,
    "attention": Attention,
    "collective": Collective,
}
_FIELDS = {name: tuple(f.name for f in fields(kind)) for name, kind in _KINDS.items()}


def workload_to_json(workload: Workload) -> dict[str, Any]:
    """The workload as a JSON object: its `kind`, then its fields in order."""
    return {"kind": workload.kind, **{name: getattr(workload, name) for name in _FIELDS[workload.kind]}}


def workload_from_json(data: object) -> Workload:
    """The workload that `workload_to_json` wrote. Raises InputError for anything else, unknown fields included."""
    named = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(named, str) or named not in _KINDS:
        raise InputError("workload", repr(data)[:120], "an object whose kind is " + ", ".join(_KINDS))
    kind = _KINDS[named]
    # Tables of 100,000 workloads repeat a few words: each is kept once.
    values: dict[str, Any] = {name: intern(v) if type(v) is str else v for name, v in data.items() if name != "kind"}
    unknown = values.keys() - set(_FIELDS[named])
    if unknown:
        raise InputError(f"workload {named}", f"field {sorted(unknown)[0]!r}", "only its own fields")
    try:
        return kind(**values)
    except TypeError as error:
        raise InputError(f"workload {named}", str(error), "all of its fields") from None
