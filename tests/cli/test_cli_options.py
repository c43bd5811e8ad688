"""Dataclasses as groups of a command's options, and the texts of options as numbers."""

from dataclasses import dataclass

import pytest
import typer
from typer.testing import CliRunner

from quantbench.cli.options import argument, command, integers, option, percentage, typed_words
from quantbench.errors import InputError


@dataclass(frozen=True, kw_only=True)
class GridPosition:
    node: str = option("here", "Name of the node.")


@dataclass(frozen=True, kw_only=True)
class Size(GridPosition):
    rows: int = option(..., "Rows.", min=1)
    exact: bool = option(False, "No rounding.")


app = typer.Typer()


@app.command()
@command
def show(*, file: str = argument("File."), size: Size, count: int = option(3, "Count.")) -> None:
    """Print what arrived."""
    print(file, size, count)


def test_a_dataclass_is_filled_from_its_options() -> None:
    said = CliRunner().invoke(
        app, ["a.csv", "--rows", "5", "--exact", "--count", "4"], catch_exceptions=False
    )
    assert said.output.strip() == "a.csv Size(node='here', rows=5, exact=True) 4"
    said = CliRunner().invoke(app, ["a.csv", "--rows", "5", "--node", "n1"], catch_exceptions=False)
    assert said.output.strip() == "a.csv Size(node='n1', rows=5, exact=False) 3"


def test_limits_and_required_fields_are_kept() -> None:
    assert CliRunner().invoke(app, ["a.csv", "--rows", "0"]).exit_code == 2
    assert CliRunner().invoke(app, ["a.csv"]).exit_code == 2


def test_given_options_are_repeated_in_the_order_asked_for() -> None:
    assert typed_words(Size(rows=4, node="a b", exact=True), ("node", "exact", "rows")) == [
        "--node 'a b'", "--exact", "--rows 4",
    ]  # fmt: skip
    assert typed_words(Size(rows=4), ("node", "exact")) == []


def test_texts_as_numbers() -> None:
    assert integers("--tp", "") == ()
    assert integers("--tp", "8, 1,8") == (8, 1, 8)
    for wrong in ("0", "1,,2", "1.5", "9" * 11):
        with pytest.raises(InputError, match=r"--tp.*expected integers from 1"):
            integers("--tp", wrong)
    assert (percentage("--x", "0%"), percentage("--x", "50 %")) == (0.0, 0.5)
    for wrong in ("5", "101%", "nan%", "-1%"):
        with pytest.raises(InputError, match="--x"):
            percentage("--x", wrong)
    for wrong in ("0%", "100%"):
        with pytest.raises(InputError, match="between 0% and 100%"):
            percentage("--x", wrong, above=True)
