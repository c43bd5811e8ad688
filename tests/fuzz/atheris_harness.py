"""Coverage-guided fuzzing of one loader with atheris (`pip install 'quantbench[fuzz]'`, Python 3.11):

    python tests/fuzz/atheris_harness.py TARGET -runs=10000

TARGET is a name of tests/fuzz/targets.py; without one, those that there are are listed. A traceback is a find.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["quantbench"]):
        from fuzz.targets import TARGETS
        from quantbench.errors import QuantbenchError

    by_name = {target.name: target for target in TARGETS}
    if len(sys.argv) < 2 or sys.argv[1] not in by_name:
        sys.exit("one of: " + ", ".join(by_name))
    target = by_name[sys.argv[1]]
    folder = Path(tempfile.mkdtemp())
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(target.seeds()):
        (corpus / str(number)).write_bytes(seed)

    def once(data: bytes) -> None:
        with suppress(QuantbenchError):
            target.load(data, folder)

    longest = max(len(seed) for seed in target.seeds())
    atheris.Setup([sys.argv[0], str(corpus), f"-max_len={2 * longest}", *sys.argv[2:]], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
