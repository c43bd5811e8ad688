"""Options of commands: how a dataclass of options becomes a command's options, and options that most commands share.

A command takes a group of options as one parameter whose type is a dataclass. `grouped` shows typer the fields of that
dataclass in its place, and calls the command with the filled dataclass. A field is declared as a typer parameter is:

    @dataclass(frozen=True)
    class Where:
        node: Annotated[str, typer.Option(help="Name of the node.")] = ""

    @grouped
    def show(where: Where, as_json: AsJson = False) -> None: ...
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from quantbench.errors import InputError

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Results = Annotated[Path, typer.Option("--results", help="Folder that holds the runs.")]
Gpu = Annotated[
    str, typer.Option("--gpu", help="GPU: a name such as h100 or a100-40gb, or a slug of `quantbench devices`.")
]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its dataclass parameters expanded into their fields; it is called by keyword."""
    parameters = signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {one.name: one.annotation for one in parameters if is_dataclass(one.annotation)}
    expanded: list[Parameter] = []
    for parameter in parameters:
        if parameter.name in groups:
            expanded += _options(groups[parameter.name])
        else:
            expanded.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    call.__signature__ = Signature(expanded)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in expanded}
    return call


def _options(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def percentage(option: str, text: str, *, above: bool = False, most: int = 100) -> float:
    """`3%` or `0.5 %` as a share. A number without the sign is refused: 3 may mean 3 % and 0.03 as well.

    above: whether 0 % and `most` themselves are refused. most: the largest percentage.

    >>> percentage("--fail-over", "3%")
    0.03
    """
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = float("nan")
    inside = 0 < value < most if above else 0 <= value <= most
    if not text.strip().endswith("%") or not isfinite(value) or not inside:
        bounds = f"between 0% and {most}%" if above else f"from 0% to {most}%"
        raise InputError(option, repr(text), f"a percentage {bounds}, such as 3%")
    return value / 100


def integers(option: str, text: str, *, low: int = 1, high: int = 2**31 - 1) -> tuple[int, ...]:
    """Integers, comma separated, in the order given; () for no text.

    >>> integers("--tp", "1, 2,4")
    (1, 2, 4)
    """
    if not text:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,10}", word) and low <= int(word) <= high for word in words):
        bounds = f"of at least {low}" if high == 2**31 - 1 else f"from {low} to {high}"
        raise InputError(option, repr(text), f"integers {bounds}, comma separated")
    return tuple(int(word) for word in words)
