"""Looks up the shapes of published models by name in presets.toml."""

import tomllib
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from quantbench.errors import InputError
from quantbench.workload.transformer import TransformerShape

# Keys in presets.toml that are not fields of the shape.
_ABOUT = ("source", "published_parameters")


def preset(name: str) -> TransformerShape:
    """Returns the shape of a published model for one sample on one GPU. Raises InputError for an
    unknown name.

    >>> preset("gemma-7b").head_dim
    256
    """
    found = _data().get(name)
    if found is None:
        near = get_close_matches(name.lower(), preset_names(), n=3, cutoff=0.5) or preset_names()
        raise InputError("model", repr(name), "one of " + ", ".join(near))
    return TransformerShape(**{key: value for key, value in found.items() if key not in _ABOUT})


def preset_names() -> tuple[str, ...]:
    return tuple(_data())


def preset_source(name: str) -> str:
    return str(_data()[name]["source"])


def published_parameters(name: str) -> float:
    return float(_data()[name]["published_parameters"])


@cache
def _data() -> dict[str, dict[str, Any]]:
    return tomllib.loads(
        (files("quantbench.workload") / "presets.toml").read_text(encoding="utf-8")
    )
