"""Declares options of commands and converts their texts to numbers.

Entry points: `command`, `option`, `argument`; the options that several commands share,
`json_option`, `gpu_option`, `library_option` and `results_option`; `integers` and `percentage`,
which parse; `typed_words`. Used by every command.

A command is a function decorated with `command`. Each of its parameters is declared by `option` or
`argument`, or has a dataclass as its type whose fields are declared in the same way; the function
then receives the filled dataclass:

    @dataclass(frozen=True)
    class Where:
        node: str = option("", "Name of the node.")

    @command
    def show(where: Where, as_json: bool = json_option()) -> None: ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from math import isfinite
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, get_type_hints

import typer

from quantbench.errors import InputError
from quantbench.latency.libraries import LIBRARIES


def option(default: Any, help_text: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """Declares one option of a command.

    default: `...` for a required option. A flag whose default is False has no `--no-` form.
    names: spellings of the option (default: `--` and the parameter's name).
    more: arguments of `typer.Option`.
    """
    metadata = {"names": names, "help": help_text, "rich_help_panel": panel, **more}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


def argument(help_text: str, *, metavar: str | None = None, default: Any = ...) -> Any:
    """Declares one positional argument of a command; see `option`."""
    metadata = {"argument": True, "help": help_text, "metavar": metavar}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


def json_option() -> Any:
    """Declares `--json`, which every command has."""
    return option(False, "Print the result as JSON.", "--json")


def results_option(panel: str | None = None) -> Any:
    """Declares `--results`, for commands that create runs."""
    return option(Path("results"), "Folder that holds the runs.", panel=panel)


def gpu_option(default: Any = ..., panel: str | None = None) -> Any:
    """Declares `--gpu`, for commands that need no GPU at hand."""
    return option(
        default,
        "GPU: a name such as h100 or a100-40gb, or a slug of `quantbench devices`.",
        panel=panel,
    )


def library_option(panel: str | None = None) -> Any:
    """Declares `--library`, for commands that predict products."""
    text = f"Whose kernels run: {', '.join(LIBRARIES)} (default: the one with the largest public table)."
    return option("", text, panel=panel)


def profile_option(panel: str | None = None) -> Any:
    """Declares `--profile`, for commands that predict (`times.chosen_times`)."""
    return option(
        None, "Measured profile (JSON file), instead of the models of --gpu.", panel=panel
    )


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a function a typer command. The result takes keyword arguments with their declared
    defaults.
    """
    parameters = signature(function, eval_str=True).parameters.values()
    groups: dict[str, Any] = {
        one.name: one.annotation for one in parameters if is_dataclass(one.annotation)
    }
    declared: list[Parameter] = []
    for one in parameters:
        if one.name in groups:
            hints = get_type_hints(groups[one.name], include_extras=True)
            declared += [
                _parameter(each.name, hints[each.name], each) for each in fields(groups[one.name])
            ]
        else:
            declared.append(_parameter(one.name, one.annotation, one.default))
    defaults = {one.name: one.default for one in declared}

    @wraps(function)
    def call(**given: Any) -> None:
        values = {**defaults, **given}
        for name, group in groups.items():
            values[name] = group(**{one.name: values.pop(one.name) for one in fields(group)})
        function(**values)

    call.__signature__ = Signature(declared)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in declared}
    return call


def _parameter(name: str, hint: Any, declared: Field[Any]) -> Parameter:
    default = Parameter.empty if declared.default is MISSING else declared.default
    settings = dict(declared.metadata)
    if settings.pop("argument", False):
        shown = typer.Argument(**settings)
    else:
        names = settings.pop("names") or (
            (f"--{name.replace('_', '-')}",) if default is False else ()
        )
        shown = typer.Option(*names, **settings)
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, shown]
    )


def typed_words(options: Any, names: Iterable[str]) -> list[str]:
    """Formats the options that differ from their defaults, as typed. names: fields in the order of
    the output.
    """
    usual = {one.name: one.default for one in fields(options)}
    words = []
    for name in names:
        value, typed = getattr(options, name), f"--{name.replace('_', '-')}"
        if value == usual[name]:
            continue
        if isinstance(value, bool):
            words.append(typed if value else typed.replace("--", "--no-", 1))
        else:
            words += [
                f"{typed} {quote(str(one))}"
                for one in (value if isinstance(value, list) else [value])
            ]
    return words


def percentage(option: str, text: str, *, above: bool = False, most: int = 100) -> float:
    """Converts `3%` or `0.5 %` to a share. Raises InputError without the sign: 0.03 could mean 3 %
    or 0.03 %.

    above: whether 0 % and `most` are excluded.
    most: largest percentage.

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
    """Parses comma-separated integers in their order; () for an empty text.

    >>> integers("--tp", "1, 2,4")
    (1, 2, 4)
    """
    if not text:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,10}", word) and low <= int(word) <= high for word in words):
        raise InputError(option, repr(text), f"integers from {low} to {high:,}, comma separated")
    return tuple(int(word) for word in words)
