"""Reads files that a user names, and replaces files in one step.

Only regular files up to a size limit are read: a pipe could block forever, a device never ends, and
a huge file could exhaust the memory. Other files raise OSError with the reason in `strerror`.
`open_unpacked` unpacks .gz and .xz files. `write_file` replaces a file so that readers never see
part of its content.
"""

import errno
import gzip
import io
import json
import lzma
import os
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from quantbench.errors import StoreError, one_line
from quantbench.units import size

#: Default size limit, which suffices for configurations, run.json, profiles, models and tables.
_LARGEST_BYTES = 2**29
#: Exceptions that reading a file may raise, including packed files.
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)


def open_binary(path: str | os.PathLike[str], *, most_bytes: int = _LARGEST_BYTES) -> BinaryIO:
    """Opens a regular file of at most `most_bytes` for reading, without blocking.

    Raises OSError, with the reason in `strerror`, for a missing or unreadable file, a folder, a
    pipe, a device, a larger file or a name with a NUL byte.
    """
    try:
        # With O_NONBLOCK, opening a pipe does not wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from None
    try:
        found = os.fstat(handle)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(found.st_mode):
            kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
            kind = kinds.get(stat.S_IFMT(found.st_mode), "a device")
            raise OSError(errno.EINVAL, f"{kind}, not a regular file", os.fspath(path))
        if found.st_size > most_bytes:
            raise OSError(
                errno.EFBIG,
                f"{size(found.st_size)}, more than the {size(most_bytes)} that are read",
                os.fspath(path),
            )
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def open_text(path: str | os.PathLike[str], *, encoding: str = "utf-8") -> TextIO:
    """Opens a file with `open_unpacked`, as text.

    Line ends stay unchanged, because the csv module needs them.
    """
    return io.TextIOWrapper(open_unpacked(path), encoding=encoding, newline="")


def open_unpacked(path: str | os.PathLike[str], *, most_bytes: int = _LARGEST_BYTES) -> BinaryIO:
    """Opens a file with `open_binary`, and unpacks .gz and .xz files.

    most_bytes: maximum size of the file, and of the unpacked content. Reading more than this raises
        OSError.
    """
    file = open_binary(path, most_bytes=most_bytes)
    match Path(path).suffix:
        case ".gz":
            unpacked = _Unpacked(file, gzip.GzipFile(fileobj=file), most_bytes)
        case ".xz":
            unpacked = _Unpacked(file, lzma.LZMAFile(file), most_bytes)  # noqa: SIM115
        case _:
            return file
    return io.BufferedReader(unpacked, 2**16)


class _Unpacked(io.RawIOBase):
    """Stream of a packed file's content.

    packed: the packed file, which is closed with the stream.
    content: stream that unpacks the file.
    most_bytes: maximum size of the unpacked content. Reading more than this raises OSError.
    """

    def __init__(
        self, packed: BinaryIO, content: gzip.GzipFile | lzma.LZMAFile, most_bytes: int
    ) -> None:
        self._packed = packed
        self._content = content
        self._most_bytes = most_bytes
        self._read_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        count = self._content.readinto(buffer)
        self._read_bytes += count
        if self._read_bytes > self._most_bytes:
            raise OSError(
                errno.EFBIG, f"unpacked, more than the {size(self._most_bytes)} that are read"
            )
        return count

    def close(self) -> None:
        if not self.closed:
            self._content.close()
            self._packed.close()
        super().close()


def read_bytes(path: str | os.PathLike[str], *, most_bytes: int = _LARGEST_BYTES) -> bytes:
    """Returns the content of a regular file. Raises OSError for the reasons in `open_binary`."""
    with open_binary(path, most_bytes=most_bytes) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:  # the file has grown, or reports size 0 like files in /proc
        raise OSError(
            errno.EFBIG, f"more than the {size(most_bytes)} that are read", os.fspath(path)
        )
    return content


def read_text(path: str | os.PathLike[str], *, most_bytes: int = _LARGEST_BYTES) -> str:
    """Returns the content of a UTF-8 file.

    Raises OSError for the reasons in `open_binary`, and UnicodeDecodeError if the content is not
    UTF-8.
    """
    return read_bytes(path, most_bytes=most_bytes).decode("utf-8")


def read_json(path: str | os.PathLike[str], *, most_bytes: int = _LARGEST_BYTES) -> Any:
    """Returns the value in a JSON file.

    Raises OSError for the reasons in `open_binary`, and ValueError if the content is not JSON in
    UTF-8.
    """
    try:
        return json.loads(read_text(path, most_bytes=most_bytes))
    except RecursionError as error:
        raise ValueError(str(error)) from None


def reason(error: Exception) -> str:
    """Returns the reason of an error in reading a file, without the file's name.

    >>> reason(FileNotFoundError(2, "No such file or directory", "a.json"))
    'No such file or directory'
    """
    text = error.strerror if isinstance(error, OSError) else None
    return one_line(text or str(error) or type(error).__name__)


def folders_with(folder: Path, pattern: str) -> list[Path]:
    """Returns the sorted folders below `folder` that contain a file matching a pattern.

    Folders that cannot be read are skipped.

    pattern: glob pattern relative to `folder`, such as `*/run.json`.
    """
    if not os.path.isdir(folder):
        return []
    return sorted(found.parent for found in folder.glob(pattern))


def write_file(
    operation: str,
    path: Path,
    content: str | bytes,
    *,
    expected: str = "a file that can be written",
) -> None:
    """Replaces a file in one step, so that readers never see part of its content.

    The content is first written to a temporary file in the same folder. If `path` is a symbolic
    link, the link's target is replaced. A device or pipe is written directly. Missing folders are
    created.

    operation: name of the operation, for error messages.
    expected: expected kind of file, for error messages.

    Raises StoreError if the file cannot be written.
    """
    target = path.resolve()
    special = os.path.exists(target) and not os.path.isfile(target)  # such as /dev/stdout
    temporary = target if special else target.with_name(f"{target.name}.new")
    if isinstance(content, str):
        content = content.encode()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        if not special:
            os.replace(temporary, target)
    except OSError as error:
        if not special:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise StoreError(operation, f"{path} ({error.strerror})", expected) from None
