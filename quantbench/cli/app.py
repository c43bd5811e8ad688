"""Defines the typer application `app` of `quantbench`, with every command's name and short help.

A command's module is imported only when the command is called, so that `quantbench --help` is
printed at once.
"""

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from quantbench import __version__

#: Short help by command name. Each command is a function or typer group in the module of that name.
COMMANDS = {
    "devices": "This machine's device and its state; known GPUs.",
    "models": "List the models that --model knows.",
    "sweep": "Measure workloads over a range of sizes.",
    "predict": "Predict a sweep's result on any known GPU.",
    "advise": "Cost and waste of a shape; better shapes.",
    "pad": "Is padding worth it: to what, at what cost.",
    "explore": "Write a page with sliders over shapes.",
    "plan": "Rank layouts of a training job over GPUs.",
    "comm": "Measure collectives under torchrun.",
    "check": "Find cliffs and causes; test rules of thumb.",
    "compare": "Compare two runs; exit 1 on a regression.",
    "merge": "Merge runs of one device.",
    "report": "Write an HTML report of a run.",
    "profile": "Export tables, models and cliffs to planners.",
    "import": "Import other tools' tables and logs.",
}

# Whether a command is typed. Without a command, the list of commands is printed without rich,
# because importing rich takes as long as all other imports. The help of a command uses rich's
# panels for its groups of options.
_COMMAND_GIVEN = any(not word.startswith("-") for word in sys.argv[1:])


def load(name: str) -> Any:
    """Imports the module of a command in COMMANDS and returns its click command."""
    attribute = f"{name}_" if name == "import" else name
    found = getattr(import_module(f"quantbench.cli.{attribute}"), attribute)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False)
        found.command(name)(function)
    return get_command(found)


class _Commands(TyperGroup):
    """Group of commands that imports the module of a command when the command is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns what typer resolves, with the command itself in place of its placeholder."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load(str(name)), rest


app = typer.Typer(
    cls=_Commands,
    help="Measure, explain and predict tile and wave quantization of matrix products on GPUs.",
    no_args_is_help=True,
    add_completion=False,
    # Expected errors are printed as one line; others must show their traceback.
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if _COMMAND_GIVEN else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    """Prints the version and exits if --version is typed."""
    if wanted:
        print(f"quantbench {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = (False),
) -> None:
    pass


def _name_only() -> None:
    """Placeholder for a command whose module is not imported yet."""


for _name, _short_help in COMMANDS.items():
    app.command(_name, short_help=_short_help)(_name_only)
