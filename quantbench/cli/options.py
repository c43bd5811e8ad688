"""Turns functions into commands, declares their options, and parses percentages and integers.

A command is a function decorated with `command`. `option` or `argument` declares each parameter.
Options can also be declared as the fields of a dataclass, which is then the type of one parameter.
The function returns a `Result`, which is printed as text or, with `--json`, as JSON:

    @dataclass(frozen=True)
    class Where:
        node: str = option("", "Name of the node.")

    @command
    def show(where: Where) -> Result: ...
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, get_type_hints

import typer

from quantbench.cli.output import Result, print_result
from quantbench.errors import InputError


def option(default: Any, help_text: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """Declares one option of a command.

    default: value if the option is not typed; `...` for a required option. A flag with default
        False gets no `--no-` form.
    help_text: text in the command's help.
    names: spellings of the option; by default `--` and the parameter's name.
    panel: title of the option's group in the help.
    more: further arguments of `typer.Option`.
    """
    metadata = {"names": names, "help": help_text, "rich_help_panel": panel, **more}
    return field(default=MISSING if default is ... else default, metadata=metadata)


def argument(help_text: str, *, metavar: str | None = None, default: Any = ...) -> Any:
    """Declares one positional argument of a command; see `option`."""
    return option(default, help_text, metavar=metavar, argument=True)


def json_option() -> Any:
    """Declares `--json` for a command that reads its value.

    `command` adds the option to every other command.
    """
    return option(False, "Print the result as JSON.", "--json")


def results_option(panel: str | None = None) -> Any:
    """Declares `--results`, for commands that create runs."""
    return option(Path("results"), "Folder that holds the runs.", panel=panel)


def gpu_option(default: Any = ..., panel: str | None = None) -> Any:
    """Declares `--gpu`, for commands that predict or import times of a GPU that is not present."""
    text = "GPU: a name such as h100 or a100-40gb, or a slug of `quantbench devices`."
    return option(default, text, panel=panel)


def command(function: Callable[..., Result | None]) -> Callable[..., None]:
    """Turns a function into a typer command that has `--json` and prints the function's result.

    Python code can call the command with keyword arguments. Omitted arguments have their declared
    defaults. The command raises `typer.Exit` if the result's exit code is not 0.
    """
    groups: dict[str, Any] = {}
    declared: dict[str, Parameter] = {}
    own = signature(function, eval_str=True).parameters
    for one in own.values():
        if is_dataclass(one.annotation):
            groups[one.name] = one.annotation
            hints = get_type_hints(one.annotation)
            for each in fields(one.annotation):
                declared[each.name] = _parameter(each.name, hints[each.name], each)
        else:
            declared[one.name] = _parameter(one.name, one.annotation, one.default)
    declared.setdefault("as_json", _parameter("as_json", bool, json_option()))

    @wraps(function)
    def call(**given: Any) -> None:
        values = {**{one.name: one.default for one in declared.values()}, **given}
        as_json = values["as_json"]
        for name, group in groups.items():
            values[name] = group(**{one.name: values[one.name] for one in fields(group)})
        result = function(**{name: values[name] for name in own})
        if result is not None:
            print_result(as_json, lambda: result.answer, result.lines)
            if result.exit_code:
                raise typer.Exit(result.exit_code)

    call.__signature__ = Signature(list(declared.values()))  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in declared.values()}
    return call


def _parameter(name: str, hint: Any, declared: Field[Any]) -> Parameter:
    """Converts an option or argument to a parameter with the annotation that typer reads.

    hint: type of the value.
    """
    default = Parameter.empty if declared.default is MISSING else declared.default
    settings = dict(declared.metadata)
    names = settings.pop("names")
    if settings.pop("argument", False):
        shown = typer.Argument(**settings)
    else:
        if not names and default is False:
            names = (f"--{name.replace('_', '-')}",)
        shown = typer.Option(*names, **settings)
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, shown]
    )


def typed_words(options: Any, names: Iterable[str]) -> list[str]:
    """Formats options as a user types them, one text each (`--tp 8`).

    Options with their default value are left out. An option with several values gives one text per
    value.

    options: dataclass whose fields are options.
    names: fields to format, in the order of the output.
    """
    usual = {one.name: one.default for one in fields(options)}
    words = []
    for name in names:
        value = getattr(options, name)
        typed = f"--{name.rstrip('_').replace('_', '-')}"
        if value == usual[name]:
            continue
        if value is True:
            words.append(typed)
        elif value is False:
            words.append(typed.replace("--", "--no-", 1))
        else:
            values = value if isinstance(value, list) else [value]
            words += [f"{typed} {quote(str(one))}" for one in values]
    return words


def percentage(option: str, text: str, *, above: bool = False) -> float:
    """Converts a text such as `3%` or `0.5 %` to a fraction, 0 to 1.

    option: name of the option, for error messages.
    above: whether 0 % and 100 % are excluded.
    Raises InputError for a value out of bounds. A text without `%` is an error too, because 0.03
    could mean 3 % or 0.03 %.

    >>> percentage("--fail-over", "3%")
    0.03
    """
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = float("nan")
    inside = 0 <= value <= 100
    bounds = "from 0% to 100%"
    if above:
        inside = 0 < value < 100
        bounds = "between 0% and 100%"
    if not text.strip().endswith("%") or not inside:
        raise InputError(option, repr(text), f"a percentage {bounds}, such as 3%")
    return value / 100


def integers(option: str, text: str, *, low: int = 1, high: int = 2**31 - 1) -> tuple[int, ...]:
    """Parses comma-separated integers in their order; returns () for an empty text.

    option: name of the option, for error messages.
    Raises InputError for a word that is not an integer from `low` to `high`.

    >>> integers("--tp", "1, 2,4")
    (1, 2, 4)
    """
    if not text:
        return ()
    found = []
    for word in text.split(","):
        if not re.fullmatch(r"\s*[0-9]{1,10}\s*", word) or not low <= int(word) <= high:
            expected = f"integers from {low} to {high:,}, comma separated"
            raise InputError(option, repr(text), expected)
        found.append(int(word))
    return tuple(found)
