"""The commands. Each lives in a file of its own, imports what it needs when it runs, and prints what it got."""

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


@app.command(short_help="What is here, its state, known GPUs.")
def devices(as_json: o.AsJson = False) -> None:
    """What is here, in what state, what will spoil timings, and which GPUs are known."""
    from quantbench.cli.devices import devices as show

    show(as_json)


@app.command(short_help="The models that --model knows.")
def models(as_json: o.AsJson = False) -> None:
    """The presets that --model knows: dimensions, parameters, and where they come from."""
    from quantbench.cli.models import models as show

    show(as_json)


app.command(short_help="Time real work over sizes; keep every sample.")(sweep)
app.command(short_help="What a sweep would show on any known GPU.")(predict)
app.command(short_help="What a shape costs and wastes; better ones.")(advise)
app.command(short_help="The fastest layout over many GPUs.")(plan)
app.command(short_help="Collectives over sizes, under torchrun.")(comm)
app.command(short_help="Cliffs, their causes, and the rules judged.")(check)
app.command(short_help="Two runs, point by point; 1 on a regression.")(compare)
app.command(short_help="Runs of one device become one.")(merge)
app.command(short_help="One HTML page on a run, with pictures.")(report)

app.add_typer(profile, name="profile", short_help="Tables, models and cliffs as a file for planners.")

_import = typer.Typer(no_args_is_help=True, help="Foreign tables become runs like our own.")
_import.command("aiconfigurator")(import_aiconfigurator)
_import.command("vidur")(import_vidur)
_import.command("csv")(import_csv)
_import.command("megatron-log")(import_megatron_log)
app.add_typer(_import, name="import")
app.command(short_help="How good predictions are: docs' table.")(validate)
