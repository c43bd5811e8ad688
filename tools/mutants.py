"""Samples the mutants of a cosmic-ray session, or runs the tests of a mutated module.

A mutant is the code with one deliberate error, which the tests should find. With the arguments
SESSION COUNT, the session keeps COUNT random mutants. Without arguments, the tests run that
mutants.toml lists for each file of quantbench with uncommitted changes.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def sample(session: str, count: int) -> None:
    """Keeps `count` random mutants of the session's pending ones, and drops the others.

    Only mutants inside a definition are drawn.

    session: file of the session.
    """
    from cosmic_ray.work_db import use_db

    with use_db(session) as database:
        # Constants of a module are left out, because they are tested through the functions that use
        # them.
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
