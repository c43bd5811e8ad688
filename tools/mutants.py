"""Runs mutation tests of the core modules (`make mutants`) and reports the share of mutants that their tests detect.

cosmic-ray generates the mutants. A seeded sample of them is applied, one at a time, to copies of the checkout, and the
tests of the mutated module run against each. Surviving mutants are printed as diffs. Mutants without an effect visible
to callers are listed with their reason in `tools/equivalent_mutants.toml` and are not counted.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from queue import SimpleQueue

from cosmic_ray.ast import get_ast_from_path
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = ROOT / "tools" / "equivalent_mutants.toml"
#: core modules and their tests
TESTS = {
    "quantbench/quantization.py": ["tests/quantization/test_quantization.py", "tests/quantization/test_occupancy.py"],
    "quantbench/stats.py": ["tests/quantization/test_stats.py"],
    "quantbench/workload/transformer.py": ["tests/workload/test_workload.py"],
    "quantbench/timing/stopping.py": ["tests/timing/test_timing_stopping.py", "tests/timing/test_timing_steadiness.py"],
    "quantbench/timing/grade.py": ["tests/timing/test_timing_grade.py"],
    "quantbench/analysis/step_detection.py": [
        "tests/analysis/test_step_detection.py", "tests/analysis/test_cliffs.py",
        "tests/analysis/test_fixture_truth.py",
    ],
    "quantbench/analysis/compare.py": ["tests/analysis/test_compare.py"],
    "quantbench/planner/iteration.py": ["tests/planner/test_planner_iteration.py"],
    "quantbench/profile/interpolation.py": [
        "tests/profile/test_profile_answers.py", "tests/profile/test_profile_tables.py",
    ],
}  # fmt: skip
#: operators that only produce equivalent mutants here: `|` in annotations, decorators that cache
LEFT_OUT = ("core/ReplaceBinaryOperator_BitOr", "core/RemoveDecorator")
TIMEOUT_S = 300


@dataclass(frozen=True)
class Mutant:
    """Mutant of one module: a cosmic-ray operator, and the index of the place to which it is applied."""

    module: str
    operator: str
    occurrence: int

    def code(self) -> str:
        """Returns the source of the mutated module."""
        source = (ROOT / self.module).read_text(encoding="utf-8")
        return mutate_code(source, get_operator(self.operator)(), self.occurrence) or source

    def diff(self) -> str:
        """Returns the removed and added lines."""
        source = (ROOT / self.module).read_text(encoding="utf-8")
        changed = unified_diff(source.splitlines(), self.code().splitlines(), lineterm="", n=0)
        return "\n".join(line for line in changed if line[0] in "+-" and line[:3] not in ("+++", "---"))


def mutants_of(module: str) -> Iterator[Mutant]:
    """Yields every mutant of a module's functions and classes, in the order of cosmic-ray's operators."""
    nodes = list(_nodes(get_ast_from_path(ROOT / module)))
    for name in operator_names():
        if name.startswith(LEFT_OUT) or get_operator(name).arguments():
            continue
        positions = [node for node in nodes for _ in get_operator(name)().mutation_positions(node)]
        for occurrence, node in enumerate(positions):
            # Module constants are tested through their users.
            if ASTQuery(node).get_definition_name():
                yield Mutant(module, name, occurrence)


def _nodes(node: object) -> Iterator[object]:
    yield node
    for child in getattr(node, "children", ()):
        yield from _nodes(child)


def survives(mutant: Mutant, checkout: Path) -> bool:
    """Checks whether the module's tests pass with the mutant in `checkout`; restores the checkout afterwards."""
    path = checkout / mutant.module
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant.code(), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *TESTS[mutant.module]], cwd=checkout, env=environment, capture_output=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(original, encoding="utf-8")
    return done.returncode == 0


def equivalent() -> set[tuple[str, str]]:
    """Returns (module, diff) of the mutants known to have no visible effect."""
    listed = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["mutant"]
    return {(one["module"], one["diff"].strip()) for one in listed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=151, help="mutants to try, drawn from all modules alike")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--least", type=float, default=0.85, help="exit with 1 below this share of mutants noticed")
    parser.add_argument("--module", action="append", choices=TESTS, help="only these modules")
    options = parser.parse_args()

    known = equivalent()
    found = [m for module in options.module or TESTS for m in mutants_of(module)]
    chosen = random.Random(options.seed).sample(found, min(options.count, len(found)))
    tried = [m for m in chosen if (m.module, m.diff()) not in known]
    print(f"{len(tried)} of {len(found)} mutants, {len(chosen) - len(tried)} of the sample listed as equivalent")
    with tempfile.TemporaryDirectory() as folder:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.processes):
            copy = Path(folder) / str(number) / "quantbench"
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "build", ".*_cache"))
            free.put(copy)

        def try_one(mutant: Mutant) -> bool:
            checkout = free.get()
            try:
                return survives(mutant, checkout)
            finally:
                free.put(checkout)

        with ThreadPoolExecutor(options.processes) as pool:
            alive = list(pool.map(try_one, tried))
    for mutant, lives in zip(tried, alive, strict=True):
        if lives:
            print(f"\nsurvived in {mutant.module}:\n{mutant.diff()}")
    noticed = len(tried) - sum(alive)
    share = noticed / max(len(tried), 1)
    print(f"\n{noticed} of {len(tried)} mutants noticed: {share:.0%}; expected at least {options.least:.0%}")
    sys.exit(share < options.least)


if __name__ == "__main__":
    main()
