"""Names the kinds of workload, and converts any workload to JSON and back."""

from dataclasses import fields
from sys import intern
from typing import Any

from quantbench.errors import InputError
from quantbench.workload.moe import GroupedGemm, MoE, Permute
from quantbench.workload.ops import Attention, Cast, Collective, Gemm, Softmax

#: workloads of one GPU; a whole layer's experts are imported and predicted, never measured
Compute = Gemm | GroupedGemm | Permute | MoE | Softmax | Attention | Cast
#: all workloads that a record can have
Workload = Compute | Collective

#: classes of all workloads
CLASSES: tuple[type[Workload], ...] = (
    Gemm, GroupedGemm, Permute, MoE, Softmax, Attention, Cast, Collective,
)  # fmt: skip
_KINDS = {kind.kind: kind for kind in CLASSES}
_FIELDS = {name: tuple(f.name for f in fields(kind)) for name, kind in _KINDS.items()}


def workload_to_json(workload: Workload) -> dict[str, Any]:
    """Returns the workload as a JSON object: its `kind`, then its fields in order."""
    values = {name: getattr(workload, name) for name in _FIELDS[workload.kind]}
    return {"kind": workload.kind} | values


def workload_from_json(data: object) -> Workload:
    """Builds a workload from the output of `workload_to_json`. Raises InputError for anything
    else.
    """
    named = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(named, str) or named not in _KINDS:
        raise InputError(
            "workload", repr(data)[:120], "an object whose kind is " + ", ".join(_KINDS)
        )
    values: dict[str, Any] = {}
    for name, value in data.items():
        # Strings are interned, because tables of 100,000 workloads repeat a few of them.
        values[name] = intern(value) if type(value) is str else value
    del values["kind"]
    unknown = values.keys() - set(_FIELDS[named])
    if unknown:
        raise InputError(f"workload {named}", f"field {min(unknown)!r}", "only its own fields")
    try:
        return _KINDS[named](**values)
    except TypeError as error:
        raise InputError(f"workload {named}", str(error), "all of its fields") from None
