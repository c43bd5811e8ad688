"""What must stay light: torch and triton are loaded where work is run and nowhere else."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "quantbench"
# Layers that run work on a device; every other one must import without torch and triton.
HEAVY_LAYERS = ("providers", "timing")
HEAVY = ("torch", "triton")

# Lower layers first; imports run downward only. Names on one line may know each other.
LAYERS = (
    ("errors", "units"),
    ("files",),
    ("launch",),
    ("workload", "device"),
    ("measurement", "megatron", "quantization", "occupancy", "stats"),
    ("latency",),
    ("kernels",),
    ("providers", "timing"),
    ("store", "sweep", "importers", "comm"),
    ("cluster",),
    ("analysis", "validate"),
    ("report", "planner", "profile", "advice"),
    ("cli", "pytest_plugin", "__main__"),
    ("evidence",),
)


def light_modules() -> list[str]:
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[1] in HEAVY_LAYERS or path.stem == "__main__":
            continue
        names.append(".".join(parts[:-1] if path.stem == "__init__" else parts))
    return names


def test_everything_but_providers_and_timing_imports_without_torch() -> None:
    code = (
        "import sys, importlib\n"
        f"for name in {light_modules()!r}: importlib.import_module(name)\n"
        "import quantbench.providers, quantbench.providers.catalog, quantbench.providers.base\n"
        "import quantbench.timing, quantbench.timing.options, quantbench.timing.grade\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_help_loads_nothing_that_computes() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['quantbench', '--help']\n"
        "from quantbench.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "heavy = ('torch', 'triton', 'numpy', 'scipy', 'pandas', 'matplotlib', 'seaborn', 'sklearn')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "[]"
    assert "sweep" in done.stdout


def _layer_of(name: str) -> int:
    return next(level for level, names in enumerate(LAYERS) if name in names)


def _imports(path: Path) -> set[str]:
    """Names below quantbench that a file imports anywhere in it, types for the checker aside."""
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
            if node.module == "quantbench":
                modules = [f"quantbench.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        found |= {m.split(".")[1] for m in modules if m.startswith("quantbench.")}
    return found - {"__version__"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_down_the_layers(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    above = {name for name in _imports(path) if _layer_of(name) > _layer_of(own)}
    assert not above, f"{path.relative_to(ROOT)} imports {sorted(above)}, which stand above {own}"
