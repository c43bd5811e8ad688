"""What must stay light: torch and triton are loaded where work is run and nowhere else."""

import subprocess
import sys

from commands import ROOT

# Layers that run work on a device; every other one must import without torch and triton.
HEAVY_LAYERS = ("providers", "timing")
CODE = """
import importlib
import sys
from quantbench.__main__ import main

def show_loaded(names):
    print([name for name in names.split() if name in sys.modules], file=sys.stderr)

def end(words):
    sys.argv = ["quantbench", *words.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code

end("--help")
show_loaded("numpy scipy pandas matplotlib seaborn sklearn pyarrow torch triton")
from quantbench.cli.app import COMMANDS, load
for name in COMMANDS:
    load(name)
show_loaded("numpy scipy pandas matplotlib seaborn sklearn pyarrow torch triton")
end("advise --gpu a100 --model bloom-176b --tp 8")
end("predict --gpu a100 --dim hidden=2048")
show_loaded("scipy pandas matplotlib seaborn sklearn pyarrow torch triton")
for name in sys.stdin.read().split():
    importlib.import_module(name)
show_loaded("torch triton")
"""


def light_modules() -> list[str]:
    names = ["quantbench.providers.catalog", "quantbench.providers.base", "quantbench.timing.grade"]
    for path in sorted((ROOT / "quantbench").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[1] not in HEAVY_LAYERS and path.stem != "__main__":
            names.append(".".join(parts[:-1] if path.stem == "__init__" else parts))
    return names


def test_each_command_loads_what_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        input=" ".join(light_modules()), cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr.splitlines() == ["[]"] * 4
    assert "sweep" in done.stdout
