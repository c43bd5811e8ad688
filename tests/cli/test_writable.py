"""Where results go is tried before the work that makes them, and nothing is left behind."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quantbench.cli.output import check_file, check_folder
from quantbench.errors import StoreError


def test_folders_that_can_be_made_are_not_left_behind(tmp_path: Path) -> None:
    check_file("write", tmp_path / "new" / "deep" / "file.json")
    check_folder("write", tmp_path / "other" / "deep")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    check_file("write", tmp_path / "kept" / "file.json")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]


@pytest.mark.parametrize(
    ("check", "name", "said"),
    [
        (check_file, "folder", "write: {} (Is a directory); expected a file that can be written"),
        (check_file, "file/x.json", "write: {} (File exists); expected a file that can be written"),
        (check_folder, "file", "write: {} (File exists); expected a folder that can be written"),
        (
            check_folder,
            "file/x",
            "write: {} (Not a directory); expected a folder that can be written",
        ),
    ],
)
def test_what_cannot_be_is_one_line(
    check: Callable[[str, Path], None], name: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StoreError) as caught:
        check("write", tmp_path / name)
    assert str(caught.value) == said.format(tmp_path / name)
