"""What a narrow terminal shows of a table: all of it."""

from io import StringIO

import pytest
from rich.table import Table
from rich.text import Text

from quantbench.cli.output import SafeConsole, narrowest, say
from quantbench.errors import one_line

ROW = ("14400", "1.39 ms (0.929–2.09)", "wave 5 of 5 is 74 % full: 5.2 % idle")


def table() -> Table:
    found = Table(box=None, pad_edge=False)
    found.add_column("hidden", justify="right", no_wrap=True)
    found.add_column("time", no_wrap=True)
    found.add_column("what it loses", overflow="fold", min_width=20)
    found.add_row(*ROW)
    return found


def shown(width: int) -> list[str]:
    file = StringIO()
    console = SafeConsole(file=file, width=width, color_system=None)
    console.print(table())
    assert console.width == width
    return file.getvalue().splitlines()


def test_no_column_is_cut_on_a_narrow_terminal() -> None:
    lines = shown(20)
    assert lines[1].startswith(" 14400  1.39 ms (0.929–2.09)  wave 5 of 5 is 74 %")
    assert "…" not in "".join(lines)


def test_where_there_is_room_the_width_is_the_terminals() -> None:
    assert (
        shown(100)[1].rstrip()
        == " 14400  1.39 ms (0.929–2.09)  wave 5 of 5 is 74 % full: 5.2 % idle"
    )
    # hidden, time and the folded reason, with two spaces between them
    assert narrowest(SafeConsole(width=20), table()) == 6 + 2 + 20 + 2 + 20


def printed(*texts: str, **options: object) -> str:
    file = StringIO()
    console = SafeConsole(file=file, width=200, color_system=None, **options)
    found = Table(box=None, pad_edge=False)
    for text in texts:
        say(console, text)
        found.add_column(text)
    found.add_row(*texts)
    console.print(found)
    console.print(Text(texts[0]))
    return file.getvalue()


@pytest.mark.parametrize("text", ["mine[/v2]", "[bold]x[/bold]", ":smile:", "a[/]b", "\\[x]"])
def test_text_is_no_markup(text: str) -> None:
    assert printed(text).count(text) == 4


@pytest.mark.parametrize("text", ["a\x1b[31mb", "a\rb", "a\x07b", "a\u202eb", "a\x9b1mb", "a\x00b"])
def test_control_characters_are_shown_as_escapes(text: str) -> None:
    said = printed(text, force_terminal=True)
    assert said.replace("\n", "").isprintable()
    assert said.count(one_line(text)) >= 3


def test_a_line_stays_one_line() -> None:
    file = StringIO()
    console = SafeConsole(file=file, width=20, color_system=None)
    say(console, "\nkept in a\nb/", (" WARN", "red"), " [x]")
    assert file.getvalue() == "\nkept in a\\nb/ WARN [x]\n"
