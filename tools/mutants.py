"""Draws mutants of a cosmic-ray session (`sample`), or runs the tests of the module that differs
from git's.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def sample(session: str, count: int) -> None:
    """Keeps `count` of the session's pending mutants of functions, drawn at random."""
    from cosmic_ray.work_db import use_db

    with use_db(session) as database:
        # Constants of a module are tested through their users.
        found = [item for item in database.pending_work_items if item.mutations[0].definition_name]
        chosen = random.Random(0).sample(sorted(found, key=lambda item: str(item.mutations)), count)
        database.clear()
        database.add_work_items(chosen)
    print(f"{count} of {len(found)} mutants")


def main() -> None:
    if sys.argv[1:]:
        sample(sys.argv[1], int(sys.argv[2]))
        return
    tests = tomllib.loads(Path("tools/mutants.toml").read_text(encoding="utf-8"))["tests"]
    diff = subprocess.run(
        ["git", "diff", "--name-only", "quantbench"], check=True, capture_output=True, text=True
    )
    files = [file for module in diff.stdout.split() for file in tests[module]]
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *files]))


if __name__ == "__main__":
    main()
