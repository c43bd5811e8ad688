"""Looks up published models' shapes and sources by name in presets.toml."""

import tomllib
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from quantbench.errors import InputError
from quantbench.workload.transformer import TransformerShape

# Keys in presets.toml that are not fields of `TransformerShape`.
_ABOUT = ("published_parameters", "source")


def preset(name: str) -> TransformerShape:
    """Returns a published model's shape, for one sample on one GPU.

    Raises InputError for an unknown name.

    >>> preset("gemma-7b").head_dim
    256
    """
    found = _data().get(name)
    if found is None:
        near = get_close_matches(name.lower(), preset_names(), n=3, cutoff=0.5) or preset_names()
        raise InputError("model", repr(name), "one of " + ", ".join(near))
    return TransformerShape(**{key: value for key, value in found.items() if key not in _ABOUT})


def preset_names() -> tuple[str, ...]:
    """Returns the names of all published models in presets.toml."""
    return tuple(_data())


def published(name: str) -> dict[str, Any]:
    """Returns facts about a published model by key.

    The keys are `published_parameters`, the number that the model's authors give, and `source`, the
    document with the model's sizes.
    """
    return {key: _data()[name][key] for key in _ABOUT}


@cache
def _data() -> dict[str, dict[str, Any]]:
    """Parses presets.toml, once per process."""
    text = (files("quantbench.workload") / "presets.toml").read_text("utf-8")
    return tomllib.loads(text)
