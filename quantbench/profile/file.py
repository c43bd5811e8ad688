"""Reads and writes profile files, and detects changed or damaged files.

`Profile.save` and `Profile.load` call `write_document` and `read_document`. A profile is one JSON
file. Each table with more than 2000 rows has a Parquet file beside the JSON file. The field
`sha256` covers the rest of the JSON file, including the digests of the Parquet files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantbench.errors import InputError, StoreError
from quantbench.files import read_bytes, reason, write_file
from quantbench.profile.schema import (
    PROFILE_FORMAT,
    PROFILE_VERSION,
    InlineTable,
    ProfileFile,
    StoredFile,
)
from quantbench.profile.table import LAYOUTS, Table
from quantbench.store.typed import Json, decode, encode

#: Tables with more rows than this are written to a Parquet file beside the JSON file.
MOST_ROWS_INLINE = 2000

_DAMAGED = "was changed or damaged: its sha256 is not"


def write_document(path: Path, content: ProfileFile, tables: Mapping[str, Table]) -> None:
    """Writes the Parquet files of large tables, and then the JSON file, each file atomically.

    An interrupted write may leave old and new files side by side. `read_document` then raises
    StoreError, because the digests in the JSON file do not match the Parquet files.

    path: the JSON file.
    content: the profile without its tables.
    tables: tables by kind.

    Raises InputError for numbers that are not finite, and StoreError if a file cannot be written.
    """
    stored: dict[str, InlineTable | StoredFile] = {}
    files: list[tuple[Path, bytes]] = []
    for kind, table in tables.items():
        names = tuple(table.columns)
        if len(table) <= MOST_ROWS_INLINE:
            rows = tuple(list(row.values()) for row in table.rows())
            stored[kind] = InlineTable(names, rows)
        else:
            beside = path.with_name(f"{path.stem}.{kind}.parquet")
            packed = to_parquet(table)
            files.append((beside, packed))
            sha256 = hashlib.sha256(packed).hexdigest()
            stored[kind] = StoredFile(names, beside.name, len(table), sha256)
    data = encode(replace(content, tables=stored))
    try:
        data["sha256"] = digest(data)
    except ValueError as error:
        raise InputError("write profile", f"{path} ({error})"[:200], "finite numbers") from None
    for target, bytes_of in (*files, (path, document_text(data).encode())):
        write_file("write profile", target, bytes_of, expected="a folder that can be written")


def digest(data: Json) -> str:
    """Returns the SHA-256 of a document without its `sha256` field.

    Spaces and the order of fields do not change the digest. Raises ValueError for numbers that are
    not finite.
    """
    rest = {name: value for name, value in data.items() if name != "sha256"}
    return hashlib.sha256(
        json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


def document_text(data: Json) -> str:
    """Returns the JSON text of a profile, laid out so that `diff` compares two profiles.

    Each row, model, cliff and finding has its own line. The remaining fields have one line each.
    """
    lines = []
    for name, value in data.items():
        if name == "tables":
            text = _block({kind: _table_text(table) for kind, table in value.items()})
        elif name == "models":
            text = _block({kind: _lines(models) for kind, models in value.items()})
        else:
            text = _lines(value) if isinstance(value, list) else _text(value)
        lines.append(f" {_text(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _block(texts: dict[str, str]) -> str:
    """Returns a JSON object whose values are given as JSON texts, with each name on a new line."""
    return "{\n" + ",\n".join(f"  {_text(name)}: {text}" for name, text in texts.items()) + "}"


def _lines(values: list[Any]) -> str:
    """Returns a JSON list with each value on a line of its own."""
    return "[\n" + ",\n".join(f"   {_text(value)}" for value in values) + "]" if values else "[]"


def _table_text(table: Json) -> str:
    if "rows" not in table:
        return _text(table)
    return f'{{"columns": {_text(table["columns"])}, "rows": {_lines(table["rows"])}}}'


def to_parquet(table: Table) -> bytes:
    """Returns the table as Parquet bytes. Equal rows give equal bytes."""
    return parquet_bytes(list(table.rows()), compression="zstd", store_schema=False)


def parquet_bytes(rows: list[dict[str, Any]], **options: Any) -> bytes:
    """Returns rows as Parquet bytes. The columns are the names in the first row.

    options: options of pyarrow's `write_table`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    return bytes(sink.getvalue())


def from_parquet(kind: str, content: bytes, shown: str) -> Table:
    """Reads a table from Parquet bytes; the inverse of `to_parquet`.

    kind: kind of the table, as in LAYOUTS.
    content: bytes of the Parquet file.
    shown: name of the file for error messages.

    Raises StoreError if the content is no Parquet file, and InputError for invalid columns or
    values.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # to_pydict gives Python values. `to_numpy` would import pandas if it is installed.
        columns = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False).to_pydict()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(
            "read profile", f"{shown} ({error})"[:200].replace("\n", " "), "a Parquet file"
        ) from None
    return Table(kind, columns)


def read_document(path: Path) -> tuple[ProfileFile, dict[str, Table]]:
    """Returns the content of a profile's JSON file, and its tables by kind.

    Raises StoreError if the JSON file or a Parquet file cannot be read or was changed, and
    InputError for invalid content.
    """
    data = parse(_read(path, "a readable file"), str(path))
    stored = data.get("tables")
    if not isinstance(stored, dict) or set(stored) != set(LAYOUTS):
        raise InputError("read profile", "tables of other kinds", ", ".join(LAYOUTS))
    data["tables"] = {kind: _stored_table(kind, table) for kind, table in stored.items()}
    content = decode(ProfileFile, data, "read profile", whole=True)
    tables = {}
    for kind, table in content.tables.items():
        if isinstance(table, InlineTable):
            tables[kind] = _inline(kind, table)
        else:
            tables[kind] = _beside(kind, table, path)
    return content, tables


def _read(path: Path, expected: str) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise StoreError("read profile", f"{path} ({reason(error)})", expected) from None


def parse(raw: bytes, shown: str) -> Json:
    """Parses a profile document and checks its digest.

    raw: content of the JSON file.
    shown: name of the file for error messages.

    Raises StoreError if the document is no profile or does not match its digest, and InputError
    for another format version or a number that is not finite.
    """
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise StoreError("read profile", f"{shown} ({error})"[:200], "a whole JSON file") from None
    if not isinstance(data, dict) or data.get("format") != PROFILE_FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise StoreError(
            "read profile", f"{shown} with format {found!r}"[:200], f'format "{PROFILE_FORMAT}"'
        )
    if data.get("version") != PROFILE_VERSION:
        expected = f"{PROFILE_VERSION} (another quantbench may have written it)"
        raise InputError("read profile", f"version = {data.get('version')!r}"[:80], expected)
    try:
        right = digest(data)
    except (ValueError, RecursionError):
        raise InputError("read profile", "a number that is not finite", "finite numbers") from None
    if data.get("sha256") != right:
        raise StoreError(
            "read profile", f"{shown} {_DAMAGED} that of its content", "the file as it was exported"
        )
    return data


def _stored_table(kind: str, data: Any) -> InlineTable | StoredFile:
    """Decodes a table entry in the JSON file: inline rows, or a reference to a Parquet file."""
    who = f"profile table {kind}"
    if isinstance(data, dict) and "rows" in data:
        return decode(InlineTable, data, who)
    return decode(StoredFile, data, who)


def _inline(kind: str, stored: InlineTable) -> Table:
    """Returns a table whose rows are in the JSON file.

    Raises InputError if the columns do not match the layout of `kind`, for values of wrong types,
    and for rows of the wrong length.
    """
    who = f"profile table {kind}"
    layout = LAYOUTS[kind]
    if stored.columns != layout.names:
        raise InputError(who, f"columns {stored.columns!r}"[:120], ", ".join(layout.names))
    if not all(len(row) == len(layout.names) for row in stored.rows):
        raise InputError(who, "rows of another length", f"lists of {len(layout.names)} values")
    columns = {}
    for i, (name, type_of) in enumerate(layout.columns.items()):
        columns[name] = [row[i] for row in stored.rows]
        for value in columns[name]:
            if type(value) is not type_of and (type_of, type(value)) != (float, int):
                # numpy would convert true to 1, and 1 to "1".
                raise InputError(who, f"{name} = {value!r}"[:100], f"{type_of.__name__} values")
    return Table(kind, columns)  # type: ignore[arg-type]


def _beside(kind: str, stored: StoredFile, path: Path) -> Table:
    """Reads a table from its Parquet file, which is beside the JSON file.

    stored: the JSON file's description of the Parquet file.
    path: the JSON file.

    Raises StoreError if the Parquet file cannot be read or was changed, and InputError if the
    table does not match `stored`.
    """
    who = f"profile table {kind}"
    name = stored.file
    if not name or Path(name).name != name:
        raise InputError(who, f"file {name!r}"[:100], "the name of a file beside the profile")
    beside = path.with_name(name)
    content = _read(beside, f"the Parquet file beside {path.name}")
    if hashlib.sha256(content).hexdigest() != stored.sha256:
        raise StoreError(
            "read profile",
            f"{beside} {_DAMAGED} what {path.name} says",
            "the file as it was exported",
        )
    table = from_parquet(kind, content, str(beside))
    if stored.num_rows != len(table) or stored.columns != tuple(table.columns):
        raise InputError(
            who, f"{len(table)} rows in {name}", f"{stored.num_rows} rows of {stored.columns}"[:200]
        )
    return table
