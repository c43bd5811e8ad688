"""Texts from files, made fit for a screen: kernel names, messages and paths may hold anything."""


def printable(text: str, longest: int = 200) -> str:
    """The text on one line, without what a terminal or a font would stumble over, cut in the middle where it is long.

    >>> printable("a\\x1b[31m\\nb"), printable("cutlass_80_tensorop_bf16_s16816gemm", 21)
    ('a?[31m b', 'cutlass_80…s16816gemm')
    """
    whole = text if text.isprintable() else "".join(c if c.isprintable() else _instead(c) for c in text)
    if len(whole) <= longest:
        return whole
    half = (longest - 1) // 2
    return f"{whole[:half]}…{whole[-half:]}"


def _instead(character: str) -> str:
    return " " if character in "\t\n\r" else "?"
