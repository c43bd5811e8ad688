"""What a person may ask of an export, and what an export says of itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from quantbench.errors import InputError, StoreError
from quantbench.workload.dtypes import GEMM_DTYPES
from quantbench.workload.ops import LAYOUTS

WHO = "profile export"


@dataclass(frozen=True)
class ExportOptions:
    """provider, layout, dtype: whose rows of which kind; "" takes those that the profile has most of. backend, version:
    under which names aiconfigurator looks the tables up. model, tensor_parallel: for whose shapes Vidur's files are.
    fill: add modelled rows between measured ones. bound: rows that a model makes are so dense that straight lines
    between them stay this close to it, a ratio."""

    provider: str = ""
    layout: str = ""
    dtype: str = ""
    backend: str = "vllm"
    version: str = "quantbench"
    model: str = ""
    tensor_parallel: tuple[int, ...] = (1,)
    fill: bool = False
    bound: float = 0.05

    def __post_init__(self) -> None:
        if self.dtype not in ("", *GEMM_DTYPES):
            raise InputError(WHO, f"--dtype {self.dtype}", "one of " + ", ".join(GEMM_DTYPES))
        if self.layout not in ("", *LAYOUTS):
            raise InputError(WHO, f"--layout {self.layout}", "one of " + ", ".join(LAYOUTS))
        if not 0.001 <= self.bound <= 0.5:
            raise InputError(WHO, f"--bound {self.bound!r}", "an error from 0.001 to 0.5, as in 0.05")
        for name in (self.backend, self.version):
            if not name or any(letter in name for letter in "/\\ \0") or name in (".", ".."):
                raise InputError(WHO, f"name {name!r}", "a name without spaces and slashes")
        if not self.tensor_parallel or min(self.tensor_parallel) < 1:
            raise InputError(WHO, f"--tp {self.tensor_parallel}", "degrees of at least 1")


@dataclass
class Exported:
    """What was written. rows: by table; left_out: rows that have no place there, by reason; notes: what to know of
    the figures, in words; use: how the consumer loads it, a line or two."""

    folder: Path
    paths: list[Path] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    use: list[str] = field(default_factory=list)

    @classmethod
    def nowhere(cls) -> Exported:
        """For asking what an export would take, without its counts and notes."""
        return cls(Path())

    def leave_out(self, reason: str, rows: int) -> None:
        """Count `rows` rows that cannot be represented."""
        if rows:
            self.left_out[reason] += rows

    def path(self, *parts: str) -> Path:
        """A file to write, its folder made."""
        path = self.folder.joinpath(*parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(WHO, f"{path.parent} ({error.strerror})", "a folder that can be written") from None
        self.paths.append(path)
        return path

    def write(self, content: str | bytes, *parts: str) -> Path:
        """Write a file, whole."""
        path = self.path(*parts)
        try:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise StoreError(WHO, f"{path} ({error.strerror})", "a file that can be written") from None
        return path
