"""Reads Parquet files for the importers."""

from pathlib import Path
from typing import Any

from quantbench.errors import StoreError
from quantbench.files import read_bytes, reason

#: largest number of rows that a file may have
MOST_ROWS = 5_000_000


def read_parquet(operation: str, file: Path) -> Any:
    """Reads a Parquet file as a pyarrow Table.

    operation: command to name in error messages.
    Raises StoreError if the file cannot be read or has too many rows.
    """
    import pyarrow as pa  # imported here, because most commands read no Parquet file
    import pyarrow.parquet as pq

    try:
        found = pq.ParquetFile(pa.BufferReader(read_bytes(file)))
        if found.metadata.num_rows <= MOST_ROWS:
            return found.read()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise StoreError(operation, f"{file} ({reason(error)})", "a Parquet file") from None
    raise StoreError(
        operation, f"{file} has {found.metadata.num_rows:,} rows", f"at most {MOST_ROWS:,}"
    )
