"""Shapes of published models, read from presets.toml when they are first asked for."""

import tomllib
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from quantbench.errors import InputError
from quantbench.workload.transformer import TransformerShape

# What presets.toml says about a model beside its shape.
_ABOUT = ("source", "published_parameters")


def preset(name: str) -> TransformerShape:
    """The shape of a published model, one micro-batch of one sample on one GPU. Raises InputError for other names.

    >>> preset("gemma-7b").head_dim
    256
    """
    found = _data().get(name)
    if found is None:
        near = get_close_matches(name.lower(), preset_names(), n=3, cutoff=0.5) or preset_names()
        raise InputError("model", repr(name), "one of " + ", ".join(near))
    return TransformerShape(**{key: value for key, value in found.items() if key not in _ABOUT})


def preset_names() -> tuple[str, ...]:
    """Every model there is, in the file's order."""
    return tuple(_data())


def preset_source(name: str) -> str:
    """Where a preset's dimensions come from."""
    preset(name)
    return str(_data()[name]["source"])


def published_parameters(name: str) -> float:
    """How many parameters the model is published to have, everything counted."""
    preset(name)
    return float(_data()[name]["published_parameters"])


@cache
def _data() -> dict[str, dict[str, Any]]:
    return tomllib.loads((files("quantbench.workload") / "presets.toml").read_text(encoding="utf-8"))
