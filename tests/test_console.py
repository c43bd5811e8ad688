"""What a narrow terminal shows of a table: all of it."""

from __future__ import annotations

from io import StringIO

from rich.table import Table

from quantbench.cli.console import SafeConsole, narrowest

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
    assert shown(100)[1].rstrip() == " 14400  1.39 ms (0.929–2.09)  wave 5 of 5 is 74 % full: 5.2 % idle"
    # hidden, time and the folded reason, with two spaces between them
    assert narrowest(SafeConsole(width=20), table()) == 6 + 2 + 20 + 2 + 20
