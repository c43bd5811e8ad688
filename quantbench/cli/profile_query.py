"""What `quantbench profile query` does: shapes as they are typed, and what a profile says of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from quantbench.cli import profile_print as view
from quantbench.cli.console import output, say
from quantbench.cli.devices import device_line
from quantbench.errors import InputError, require_choice
from quantbench.profile import Estimate, Estimates, Profile

# Longer ones are no sizes, and int() refuses the very long.
_DIGITS = re.compile("[0-9]{1,19}")
_OP = re.compile("[a-z_]{1,20}")

# What each kind is typed as, and how many sizes that are.
_QUERIES = {
    "gemm": ("m,n,k or m,n,k,batch", (3, 4)),
    "softmax": ("batch,rows,cols", (3,)),
    "attention": ("batch,heads,seq,head_dim or batch,heads,seq,head_dim,kv_heads", (4, 5)),
    "collective": ("op,bytes,gpus or op,bytes,gpus,nodes, such as all_reduce,67108864,8", (2, 3)),
}


def query_profile(
    file: Path, asked: Mapping[str, Sequence[str]], dtype: str, layout: str, direction: str, as_json: bool
) -> None:
    """Ask a profile for shapes. asked: as typed, by kind."""
    if not any(asked.values()):
        *others, last = (f"--{kind}" for kind in _QUERIES)
        raise InputError("profile query", "no shape", f"{', '.join(others)} or {last}")
    require_choice("profile query", "--direction", direction, ("forward", "backward"))
    found = Profile.load(file)
    answers = [
        (kind, text, _ask(found, kind, text, dtype or None, layout or None, direction))
        for kind, texts in asked.items()
        for text in texts
    ]
    if as_json:
        listed = [{"kind": kind, "shape": _shape(kind, text), **asdict(one)} for kind, text, one in answers]
        print(json.dumps({"device": found.device.name, "answers": listed}, indent=1, allow_nan=False))
        return
    console = output()
    say(console, device_line(found.device))
    console.print()
    console.print(view.answers_table(answers))


def _ask(profile: Profile, kind: str, text: str, dtype: str | None, layout: str | None, direction: str) -> Estimate:
    one: Estimate | Estimates
    op, sizes = _typed(kind, text)
    if kind == "gemm":
        m, n, k, *batch = sizes
        one = profile.gemm(m, n, k, dtype=dtype, layout=layout, batch=batch[0] if batch else 1)
    elif kind == "softmax":
        mask = "causal" if sizes[1] == sizes[2] else "none"
        one = profile.softmax(*sizes, dtype=dtype, mask=mask, direction=direction)
    elif kind == "attention":
        batch_size, heads, seq, head_dim, *kv_heads = sizes
        kv = kv_heads[0] if kv_heads else 0
        one = profile.attention(batch_size, heads, seq, seq, head_dim, kv, dtype=dtype, direction=direction)
    else:
        message_bytes, num_gpus, *nodes = sizes
        one = profile.collective(op, message_bytes, num_gpus, num_nodes=nodes[0] if nodes else 1, dtype=dtype)
    assert isinstance(one, Estimate)
    return one


def _shape(kind: str, text: str) -> list[str | int]:
    """What was asked for, as JSON has it."""
    op, sizes = _typed(kind, text)
    return [op, *sizes] if op else [*sizes]


def _typed(kind: str, text: str) -> tuple[str, tuple[int, ...]]:
    """(the op of a collective, else "", the sizes)."""
    words, counts = _QUERIES[kind]
    op, parts = "", [part.strip() for part in text.split(",")]
    if kind == "collective":
        op, *parts = parts
    named = bool(_OP.fullmatch(op)) == (kind == "collective")
    if not named or len(parts) not in counts or not all(_DIGITS.fullmatch(part) for part in parts):
        raise InputError(f"--{kind}", repr(text)[:100], words)
    return op, tuple(int(part) for part in parts)
