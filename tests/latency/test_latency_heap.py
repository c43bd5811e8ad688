"""Temporaries of a cost model must not be fetched from the kernel anew: a fit took a million page
faults for them.
"""

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import numpy as np
from quantbench.latency.gemm.cost_model import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        x = np.ones(50_000)  # 400 kB, beyond what glibc keeps by itself
        y = x + x
        del x, y
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
keep_freed_memory()
faults()
print(first, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is told")
def test_freed_arrays_are_used_again_without_a_page_fault() -> None:
    untold = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=untold
    )
    before, after = (int(count) for count in done.stdout.split())
    assert after < 100 < before
