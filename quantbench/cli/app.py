"""The command line: one module per command, each of which imports what it needs when it runs."""

import sys
from typing import Annotated

import typer

from quantbench import __version__
from quantbench.cli import options as o
from quantbench.cli.advise import advise
from quantbench.cli.check import check
from quantbench.cli.comm import comm
from quantbench.cli.compare import compare
from quantbench.cli.import_megatron import import_megatron_log
from quantbench.cli.importing import import_aiconfigurator, import_csv, import_vidur
from quantbench.cli.merge import merge
from quantbench.cli.plan import plan
from quantbench.cli.predict import predict
from quantbench.cli.profile import profile
from quantbench.cli.report import report
from quantbench.cli.sweep import sweep
from quantbench.cli.validate import validate

# Loading rich takes as long as everything else together, and the list of commands needs no panels: it should answer
# at once. A command's own help, with its groups of options, gets them.
_COMMAND_GIVEN = any(not word.startswith("-") for word in sys.argv[1:])

app = typer.Typer(
    help="Measure, explain and predict tile and wave quantization of matrix products on GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # errors raised on purpose are one line; anything else should show its traceback
    rich_markup_mode="rich" if _COMMAND_GIVEN else None,
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


@app.command(short_help="This machine's device and its state; known GPUs.")
def devices(as_json: o.AsJson = False) -> None:
    """Show the device of this machine, its state, what may disturb timings, and the known GPUs."""
    from quantbench.cli.devices import devices as show

    show(as_json)


@app.command(short_help="List the models that --model knows.")
def models(as_json: o.AsJson = False) -> None:
    """The presets that --model knows: dimensions, parameters, and where they come from."""
    from quantbench.cli.models import models as show

    show(as_json)


app.command(short_help="Measure workloads over a range of sizes.")(sweep)
app.command(short_help="Predict a sweep's result on any known GPU.")(predict)
app.command(short_help="What a shape costs and wastes; better ones.")(advise)
app.command(short_help="The fastest layout over many GPUs.")(plan)
app.command(short_help="Measure collectives under torchrun.")(comm)
app.command(short_help="Find cliffs and causes; test rules of thumb.")(check)
app.command(short_help="Compare two runs; exit 1 on a regression.")(compare)
app.command(short_help="Merge runs of one device.")(merge)
app.command(short_help="Write an HTML report of a run.")(report)

app.add_typer(profile, name="profile", short_help="Export tables, models and cliffs to planners.")

_import = typer.Typer(no_args_is_help=True, help="Import other tools' tables and logs as runs.")
_import.command("aiconfigurator")(import_aiconfigurator)
_import.command("vidur")(import_vidur)
_import.command("csv")(import_csv)
_import.command("megatron-log")(import_megatron_log)
app.add_typer(_import, name="import", short_help="Import other tools' tables and logs.")
app.command(short_help="Measure the accuracy of the predictions.")(validate)
