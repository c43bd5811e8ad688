"""The commands. Each lives in a file of its own, imports what it needs when it runs, and prints what it got."""

from typing import Annotated

import typer

from quantbench import __version__
from quantbench.cli import options as o
from quantbench.cli.compare import compare
from quantbench.cli.sweep import sweep

app = typer.Typer(
    help="Measure, explain and predict tile and wave quantization of matrix products on GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # errors raised on purpose are one line; anything else should show its traceback
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"quantbench {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = (
        False
    ),
) -> None:
    pass


@app.command()
def devices(as_json: o.AsJson = False) -> None:
    """What is here, in what state, what will spoil timings, and which GPUs are known."""
    from quantbench.cli.devices import devices as show

    show(as_json)


app.command()(sweep)
app.command()(compare)
