"""Every target by atheris, one process each: `python tests/fuzz/run_atheris.py -runs=10000`. Ends at the first find."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]


def main() -> None:
    from fuzz.targets import TARGETS

    if find_spec("atheris") is None:
        print("atheris is not installed (pip install 'quantbench[fuzz]', Python 3.11): its part is left out")
        return
    for target in TARGETS:
        print(target.name, flush=True)
        command = [sys.executable, str(HERE / "atheris_harness.py"), target.name, "-close_fd_mask=0", *sys.argv[1:]]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            print(done.stdout[-3000:], done.stderr[-3000:])
            sys.exit(f"{target.name}: exit code {done.returncode}")


if __name__ == "__main__":
    main()
