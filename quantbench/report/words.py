"""Texts from files, made fit for a screen: kernel names, messages and paths may hold anything."""

from quantbench.errors import one_line


def printable(text: str, longest: int = 200) -> str:
    """The text on one line, with control characters as escapes, cut in the middle where it is long.

    >>> printable("a\\x1b[31m\\nb"), printable("cutlass_80_tensorop_bf16_s16816gemm", 21)
    ('a\\\\x1b[31m\\\\nb', 'cutlass_80…s16816gemm')
    """
    whole = one_line(text)
    if len(whole) <= longest:
        return whole
    half = (longest - 1) // 2
    return f"{whole[:half]}…{whole[-half:]}"
