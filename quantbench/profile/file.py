"""Reads and writes profile files: one JSON file, and a Parquet file beside it for each table of more than 2000 rows.

Entry points: `write_document` and `read_document`, used by `Profile` (`profile.profile`); `to_parquet` and
`parquet_bytes`, used by `exporters.flat` and `exporters.aiconfigurator`; `schema`, the JSON Schema for users.

`sha256` in the JSON covers everything else in it, including the digest of each Parquet file, so any change is detected.
A change that an old reader would misread needs a new version number, and a migration from the old version in
`MIGRATIONS`.

History of the format "quantbench-profile":
1  first version.
2  a model of products names its library, and stores its trees more compactly; there is a table of experts (moe).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError, StoreError
from quantbench.files import read_bytes, reason, write_file
from quantbench.profile.parts import StoredFile
from quantbench.profile.schema import PROFILE_FORMAT, PROFILE_VERSION
from quantbench.profile.schema import schema as schema
from quantbench.profile.table import FLAG, INTEGER, LAYOUTS, NUMBER, TEXT, Table
from quantbench.store.typed import Json, decode, encode


def _with_libraries(data: Json) -> Json:
    """Names the library of each model of products: the one in the software that was imported, or else torch. Adds an
    empty table of experts."""
    try:
        imported = next((name for name in ("vllm", "sglang", "trtllm", "aiter") if name in data["software"]), "torch")
        products = [{**model, "library": imported} for model in data["models"]["gemm"]]
        tables = {**data["tables"], "moe": {"columns": list(LAYOUTS["moe"].names), "rows": []}}
        return {**data, "models": {**data["models"], "gemm": products}, "tables": tables}
    except (KeyError, TypeError) as error:
        raise InputError("read profile", f"models without {error}"[:100], "the models of version 1") from None


#: version → function that turns a document into the next version
MIGRATIONS: Mapping[int, Callable[[Json], Json]] = {1: _with_libraries}


def upgrade(data: Json, who: str) -> Json:
    """Migrates a document to the current version. Raises InputError for an unknown version."""
    require_version(data, who)
    while data["version"] != PROFILE_VERSION:
        version = data["version"]
        data = {**MIGRATIONS[version](data), "version": version + 1}
    return data


def require_version(data: Json, who: str) -> None:
    """Raises InputError for a document of an unknown version."""
    version, known = data.get("version"), (*MIGRATIONS, PROFILE_VERSION)
    if type(version) is not int or version not in known:
        expected = f"one of {', '.join(map(str, known))} (a newer quantbench may have written it)"
        raise InputError(who, f"version = {version!r}"[:80], expected)


#: larger tables are written to a Parquet file beside the JSON
MOST_ROWS_INLINE = 2000

# Types of a column's values in JSON.
_TYPES: dict[str, tuple[type, ...]] = {INTEGER: (int,), NUMBER: (int, float), FLAG: (bool,), TEXT: (str,)}
_PARTS = ("device", "software", "provenance", "tables", "models", "cliffs", "findings")
# Parts with one line per entry, so that two profiles can be compared with `diff`.
_LINES = ("cliffs", "findings")


@dataclass(frozen=True)
class _StoredTable:
    """Table in a profile's JSON; `StoredFile` is its counterpart for a Parquet file."""

    columns: tuple[str, ...]
    rows: tuple[list[Any], ...]


def write_document(path: Path, parts: Json, tables: dict[str, Table]) -> None:
    """Writes the Parquet files, then the JSON, each atomically."""
    stored: Json = {}
    files: list[tuple[Path, bytes]] = []
    for kind, table in tables.items():
        if len(table) <= MOST_ROWS_INLINE:
            columns = (values.tolist() for values in table.columns.values())
            stored[kind] = {"columns": list(table.columns), "rows": list(map(list, zip(*columns, strict=True)))}
            continue
        beside = path.with_name(f"{path.stem}.{kind}.parquet")
        content = to_parquet(table)
        files.append((beside, content))
        stored[kind] = encode(
            StoredFile(tuple(table.columns), beside.name, len(table), hashlib.sha256(content).hexdigest())
        )
    data = {"format": PROFILE_FORMAT, **parts, "tables": stored}
    data = {"format": data.pop("format"), "version": data.pop("version"), "sha256": digest(data), **data}
    data["sha256"] = digest(data)
    for target, content in (*files, (path, document_text(data).encode())):
        write_file("write profile", target, content, expected="a folder that can be written")


def digest(data: Json) -> str:
    """Returns the SHA-256 of a document without its `sha256` field, independent of spaces and field order."""
    rest = {name: value for name, value in data.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def document_text(data: Json) -> str:
    """Returns the JSON text, with one line per part, row, model, cliff and finding."""
    lines = []
    for name, value in data.items():
        if name == "tables":
            text = _block({kind: _table_text(table) for kind, table in value.items()})
        elif name == "models":
            text = _block({kind: _rows_text(models) for kind, models in value.items()})
        else:
            text = _rows_text(value) if name in _LINES else _text(value)
        lines.append(f" {_text(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _block(texts: dict[str, str]) -> str:
    return "{\n" + ",\n".join(f"  {_text(name)}: {text}" for name, text in texts.items()) + "}" if texts else "{}"


def _rows_text(values: Any) -> str:
    return "[\n" + ",\n".join(f"   {_text(value)}" for value in values) + "]" if values else "[]"


def _table_text(table: Json) -> str:
    if "rows" not in table:
        return _text(table)
    return f'{{"columns": {_text(table["columns"])}, "rows": {_rows_text(table["rows"])}}}'


def to_parquet(table: Table) -> bytes:
    """Returns the table as Parquet bytes, which are the same for the same rows."""
    columns = {name: v.tolist() if v.dtype.kind == "U" else v for name, v in table.columns.items()}
    return parquet_bytes(columns, compression="zstd", store_schema=False)


def parquet_bytes(columns: Mapping[str, Any], **options: Any) -> bytes:
    """Returns a table as Parquet bytes. options: of pyarrow's `write_table`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, **options)
    return bytes(sink.getvalue())


def read_document(path: Path) -> tuple[Json, dict[str, Table]]:
    """Returns (parts in the current version, tables). Raises StoreError if a file cannot be read or was changed,
    InputError if its content is invalid."""
    data = parse(_read(path, "a readable file"), str(path))
    data = upgrade(data, f"profile {path}")
    extra = sorted(set(data) ^ {"format", "version", "sha256", *_PARTS})
    if extra:
        raise InputError(f"profile {path}", f"field {extra[0][:60]!r}", "exactly " + ", ".join(_PARTS))
    if not isinstance(data["tables"], dict) or set(data["tables"]) != set(LAYOUTS):
        raise InputError(f"profile {path}", "tables of other kinds", ", ".join(LAYOUTS))
    tables = {kind: _table(path, kind, data["tables"][kind]) for kind in LAYOUTS}
    return {name: data[name] for name in _PARTS if name != "tables"}, tables


def _read(path: Path, expected: str) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise StoreError("read profile", f"{path} ({reason(error)})", expected) from None


def parse(raw: bytes, shown: str) -> Json:
    """Parses a profile document. Raises StoreError if it is not one, or if its digest is wrong."""
    try:
        data = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise StoreError("read profile", f"{shown} ({error})"[:200], "a whole JSON file") from None
    if not isinstance(data, dict) or data.get("format") != PROFILE_FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise StoreError("read profile", f"{shown} with format {found!r}"[:200], f'format "{PROFILE_FORMAT}"')
    try:
        right = digest(data)
    except (ValueError, RecursionError):
        raise InputError(f"profile {shown}", "a number that is not finite", "finite numbers") from None
    if data.get("sha256") != right:
        # A newer version may compute its digest differently: report the version, not damage.
        require_version(data, f"profile {shown}")
        raise StoreError("read profile", f"{shown} was changed or damaged: its sha256 is not that of its content",
                         "the file as it was exported")  # fmt: skip
    return data


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _table(path: Path, kind: str, data: Any) -> Table:
    who = f"profile table {kind}"
    if isinstance(data, dict) and "rows" in data:
        return _inline_table(kind, decode(_StoredTable, data, who), who)
    stored = decode(StoredFile, data, who)
    name = stored.file
    if not name or Path(name).name != name:
        raise InputError(who, f"file {name!r}"[:100], "the name of a file beside the profile")
    beside = path.with_name(name)
    content = _read(beside, f"the Parquet file beside {path.name}")
    if hashlib.sha256(content).hexdigest() != stored.sha256:
        raise StoreError("read profile", f"{beside} was changed or damaged: its sha256 is not what {path.name} says",
                         "the file as it was exported")  # fmt: skip
    table = from_parquet(kind, content, str(beside))
    if stored.num_rows != len(table) or stored.columns != tuple(table.columns):
        raise InputError(who, f"{len(table)} rows in {name}", f"{stored.num_rows} rows of {stored.columns}"[:200])
    return table


def _inline_table(kind: str, stored: _StoredTable, who: str) -> Table:
    names = LAYOUTS[kind].names
    if stored.columns != names:
        raise InputError(who, f"columns {stored.columns!r}"[:120], ", ".join(names))
    if not all(len(row) == len(names) for row in stored.rows):
        raise InputError(who, "rows of another length", f"lists of {len(names)} values")
    columns: dict[str, list[Any]] = dict(zip(names, map(list, zip(*stored.rows, strict=True)), strict=False))
    for name, of_column in LAYOUTS[kind].columns.items():
        for value in columns.setdefault(name, []):
            if type(value) not in _TYPES[of_column]:  # numpy would take true for 1, and 1 for "1"
                raise InputError(who, f"{name} = {value!r}"[:100], f"{of_column} values")
    return Table(kind, columns)  # type: ignore[arg-type]


def from_parquet(kind: str, content: bytes, shown: str) -> Table:
    """Inverse of `to_parquet`. Raises StoreError if it is no Parquet file, InputError for other columns or nulls."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    who = f"profile table {kind}"
    names = list(LAYOUTS[kind].names)
    texts = [name for name, of_column in LAYOUTS[kind].columns.items() if of_column == TEXT]
    try:
        found = pq.ParquetFile(pa.BufferReader(content), read_dictionary=texts).read(use_threads=False)
    except (pa.ArrowException, OSError, KeyError) as error:  # KeyError: a text column is missing
        raise StoreError("read profile", f"{shown} ({error})"[:200].replace("\n", " "), "a Parquet file") from None
    if found.column_names != names:
        raise InputError(who, "columns " + ", ".join(found.column_names)[:150], ", ".join(names))
    columns = {}
    arrow = {
        INTEGER: pa.int64(), NUMBER: pa.float64(), FLAG: pa.bool_(), TEXT: pa.dictionary(pa.int32(), pa.string()),
    }  # fmt: skip
    for name, of_column in LAYOUTS[kind].columns.items():
        values = found.column(name).combine_chunks()
        if values.null_count:
            raise InputError(who, f"{values.null_count} nulls in {name}", "a value in every row")
        if values.type != arrow[of_column]:
            raise InputError(who, f"{name} of type {values.type}", str(arrow[of_column]))
        columns[name] = _numpy(values, of_column)
    return Table(kind, columns)


def _numpy(values: Any, kind: str) -> npt.NDArray[Any]:
    """Converts an Arrow array without nulls, not by `to_numpy`, which would import pandas if it is installed."""
    if kind == TEXT:
        words = np.array(values.dictionary.to_pylist() or [""], dtype=np.str_)
        return np.asarray(words[np.from_dlpack(values.indices)])
    if kind == FLAG:
        bits = np.unpackbits(np.frombuffer(values.buffers()[1], dtype=np.uint8), bitorder="little")
        return np.asarray(bits[values.offset : values.offset + len(values)], dtype=np.bool_)
    return np.from_dlpack(values)
