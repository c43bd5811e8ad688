"""The columns of a profile's tables: which name a workload, which say what it took."""

from __future__ import annotations

from dataclasses import dataclass

from quantbench.errors import InputError

INTEGER, TEXT, NUMBER, FLAG = "integer", "text", "number", "flag"


@dataclass(frozen=True)
class Column:
    """name: with its unit. kind: integer, text, number or flag."""

    name: str
    kind: str


@dataclass(frozen=True)
class Layout:
    """The columns of one kind of table, in order. keys: those that are of one row only, by which rows are sorted."""

    columns: tuple[Column, ...]
    keys: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Every column's name, in order."""
        return tuple(column.name for column in self.columns)


def _columns(kind: str, *names: str) -> tuple[Column, ...]:
    return tuple(Column(name, kind) for name in names)


# low_us, high_us: 95 % interval of the median; both equal to latency_us where a table gives a single figure, whose
# spread nobody knows. grade: A to D. origin: measured, imported or simulated.
_TIMES = (*_columns(NUMBER, "latency_us", "low_us", "high_us"), *_columns(TEXT, "grade", "origin"))


def _layout(keys: tuple[Column, ...], more: tuple[Column, ...] = ()) -> Layout:
    return Layout((*keys, *more, *_TIMES), tuple(column.name for column in keys))


LAYOUTS: dict[str, Layout] = {
    # kernel: its name, "" where it is not known; block_m, block_n, split_k: 0 where not known.
    "gemm": _layout(
        (*_columns(INTEGER, "m", "n", "k", "batch"), *_columns(TEXT, "dtype", "layout", "provider")),
        (*_columns(TEXT, "kernel"), *_columns(INTEGER, "block_m", "block_n", "split_k")),
    ),
    "softmax": _layout(
        (*_columns(INTEGER, "batch", "rows", "cols"), *_columns(TEXT, "dtype", "mask", "direction", "provider"))
    ),
    "attention": _layout(
        (
            *_columns(INTEGER, "batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim"),
            *_columns(TEXT, "dtype"),
            *_columns(FLAG, "causal"),
            *_columns(TEXT, "direction", "provider"),
        )
    ),
    "collective": _layout(
        (
            *_columns(TEXT, "op"),
            *_columns(INTEGER, "message_bytes", "num_gpus"),
            *_columns(TEXT, "dtype"),
            *_columns(INTEGER, "num_nodes"),
            *_columns(TEXT, "provider"),
        )
    ),
}


def layout_of(kind: str) -> Layout:
    """The columns of a kind of table. Raises InputError for another kind."""
    if kind not in LAYOUTS:
        raise InputError("profile table", repr(kind)[:80], "one of " + ", ".join(LAYOUTS))
    return LAYOUTS[kind]
