"""Older profiles as the version that is read here.

History of the format "quantbench-profile":
1  first version.

A change that an old reader would misread gets a new number, and here a function that turns the older document into the
newer one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quantbench.errors import InputError
from quantbench.store.typed import Json

PROFILE_FORMAT = "quantbench-profile"
PROFILE_VERSION = 1

#: version → what turns a document of it into one of the next version
MIGRATIONS: Mapping[int, Callable[[Json], Json]] = {}


def upgrade(
    data: Json,
    who: str,
    *,
    migrations: Mapping[int, Callable[[Json], Json]] = MIGRATIONS,
    current: int = PROFILE_VERSION,
) -> Json:
    """The document in version `current`. Raises InputError for versions that are not known."""
    version = data.get("version")
    if isinstance(version, bool) or not isinstance(version, int):
        raise InputError(who, f"version = {version!r}"[:80], f"an integer up to {current}")
    if version > current:
        raise InputError(who, f"version {version}", f"at most {current}; a newer quantbench wrote it")
    while version < current:
        if version not in migrations:
            known = ", ".join(str(v) for v in sorted({*migrations, current}))
            raise InputError(who, f"version {version}", f"one of {known}")
        data = {**migrations[version](data), "version": version + 1}
        version += 1
    return data
