"""The line that is kept of other libraries' exceptions and of a dead process's output."""

from subprocess import CalledProcessError
from tempfile import gettempdir

import pytest
from fake_providers import NO_KERNEL_IMAGE

from quantbench.reasons import reason_in_output, reason_line

COMPILATION = """at 4:11:
    pid = tl.program_id(0)
    acc = tl.zeros((16, 16))
    return tl.dot(acc, b)
           ^
AssertionError('Input shapes should have K >= 16')"""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            RuntimeError(NO_KERNEL_IMAGE),
            "CUDA error: no kernel image is available for execution on the device",
        ),
        (RuntimeError(COMPILATION), "AssertionError('Input shapes should have K >= 16')"),
        (MemoryError(), "MemoryError"),
        (OSError(f"{gettempdir()}/tmpq9x/cuda_utils.so: file too short"), "…: file too short"),
        (RuntimeError("x" * 1000), f"{'x' * 149}…{'x' * 149}"),
        (CalledProcessError(-9, ["/usr/bin/cc1", "a.c"]), "cc1 ended with exit status -9"),
    ],
)
def test_the_line_that_says_why(error: Exception, line: str) -> None:
    assert reason_line(error) == line


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("", ""),
        ("loading\nFatal Python error: Segmentation fault\n", "Fatal Python error: Segmentation fault"),
        (f"Traceback (most recent call last):\n  File a\ntorch.AcceleratorError: {NO_KERNEL_IMAGE}",
         "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device"),
        ("Traceback (most recent call last):\n  File a\nKeyError: 1\n\nDuring handling of the above exception, another"
         " exception occurred:\n\nTraceback (most recent call last):\n  File b\nOSError: full\n", "OSError: full"),
        (f"terminate called\n{NO_KERNEL_IMAGE}",
         "CUDA error: no kernel image is available for execution on the device"),
    ],
)  # fmt: skip
def test_the_last_words_of_a_process(output: str, line: str) -> None:
    assert reason_in_output(output) == line
