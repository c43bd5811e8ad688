"""Finds the files of models: those that are shipped, and those of public tables, which are fitted on first use.

Entry points: `file_name`, `FOLDER`, `PublicTable`, `fitting`, `TABLE_ROWS` and `TABLE_EFFORT`. Used by `gemm.model`,
`profile.fit` and tools.

A fitted model is kept below $XDG_CACHE_HOME (~/.cache) in quantbench/models, under a name that changes with the table
and with quantbench.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantbench import __version__
from quantbench.errors import UnsupportedError
from quantbench.files import read_bytes
from quantbench.latency.gemm.files import MODEL_VERSION
from quantbench.latency.gemm.training import Effort
from quantbench.latency.gemm.trees import Growth
from quantbench.latency.libraries import TABLES, system_of
from quantbench.latency.tables import GemmTable, read_table, systems_folder

#: folder of the shipped models
FOLDER = Path(__file__).parent.parent / "models"
#: rows of a table that its model is fitted to
TABLE_ROWS = 8000
#: two members of ten trees each keep a file near 0.2 MB
TABLE_EFFORT = Effort(members=2, rows_first=1000, rows_other=600, growth=Growth(trees=10, leaf=3))


def file_name(slug: str, dtype: str, library: str) -> str:
    """Returns the name of a model's file.

    >>> file_name("h100-sxm5-80gb", "fp8", "vllm")
    'h100-sxm5-80gb-fp8-vllm.gemm'
    """
    return f"{slug}-{dtype}-{library}.gemm"


@dataclass(frozen=True)
class PublicTable:
    """Installed public table of a GPU's products.

    path: its file. shown: path below the package's data folder. kept: file of the model that is fitted to it.
    """

    slug: str
    dtype: str
    library: str
    path: Path
    shown: str
    sha256: str
    kept: Path

    @classmethod
    def find(cls, slug: str, dtype: str, library: str) -> PublicTable:
        """Returns a library's table (`libraries.libraries_of`). Raises UnsupportedError if the extra `tables` is not
        installed."""
        system, folder = system_of(slug), systems_folder()
        shown = f"{system}/gemm/{library}/{TABLES[system][library]}/gemm_perf.parquet"
        if folder is None or not (folder / "data" / shown).is_file():
            what = f"no model of {library}'s {dtype} products on {slug} is shipped"
            raise UnsupportedError(
                "GemmModel.best", what, "pip install 'quantbench[tables]', from whose tables it is fitted"
            )
        path = folder / "data" / shown
        sha256 = hashlib.sha256(read_bytes(path)).hexdigest()
        key = hashlib.sha256(f"{sha256} {MODEL_VERSION} {__version__}".encode()).hexdigest()[:12]
        kept = _cache_folder() / f"{key}-{file_name(slug, dtype, library)}"
        return cls(slug, dtype, library, path, shown, sha256, kept)

    def read(self) -> GemmTable:
        return read_table(self.path, self.slug, dtype=self.dtype, library=self.library)

    @property
    def provenance(self) -> dict[str, str]:
        """Origin of the table, as stored in a model."""
        from importlib.metadata import version

        return {
            "table": self.shown, "sha256": self.sha256,
            "package": f"aiconfigurator-core {version('aiconfigurator-core')}", "framework": self.library,
            "framework_version": TABLES[system_of(self.slug)][self.library], "measured_on": self.slug,
        }  # fmt: skip


def _cache_folder() -> Path:
    """Returns the user's folder of models by the XDG base directory specification: only absolute paths count."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return base / "quantbench" / "models"


@contextmanager
def fitting(table: PublicTable) -> Iterator[Callable[[float], None]]:
    """Shows a bar on stderr while a table's model is fitted; yields a function that takes the share that is done."""
    # Imported here, because few commands fit a model.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    words = f"fitting {table.library}'s {table.dtype} products on {table.slug}, once (about a minute)"
    if not console.is_terminal:
        console.print(words, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(words, total=1.0)
        yield lambda done: bar.update(task, completed=done)
