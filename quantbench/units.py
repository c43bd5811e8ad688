"""Formats quantities with their units, and parses durations."""

import re
from collections.abc import Mapping, Sequence
from math import floor, log10

from quantbench.errors import InputError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600}


def parse_duration_s(option: str, text: str) -> float:
    """Parses a duration such as `90s`, `8m`, `1h`, `500ms` or `1m30s`, and returns its seconds.

    option: name of the option, for error messages.

    Raises InputError for other texts.

    >>> parse_duration_s("--budget", "1m30s")
    90.0
    """
    parts = _DURATION.findall(text)
    total_s = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if "".join(map("".join, parts)) != text or total_s <= 0:
        raise InputError(option, repr(text), "a time such as 90s, 8m or 1h")
    return total_s


def duration(seconds: float) -> str:
    """Formats a duration in seconds, minutes or hours.

    >>> duration(7.4), duration(95), duration(7320)
    ('7 s', '1 min 35 s', '2 h 2 min')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def counted(number: int, what: str) -> str:
    """Formats a number of things.

    >>> counted(1, "point"), counted(2000, "point")
    ('1 point', '2,000 points')
    """
    plural = "" if number == 1 else "s"
    return f"{number:,} {what}{plural}"


def listed(items: Sequence[object], most: int, separator: str = ", ") -> str:
    """Formats the first `most` items, with an ellipsis for the rest.

    >>> listed([1, 2, 3], most=2)
    '1, 2, …'
    """
    shown = [str(item) for item in items[:most]]
    if len(items) > most:
        shown.append("…")
    return separator.join(shown)


def billions(count: float) -> str:
    """Formats a number of parameters to three significant digits or whole billions.

    >>> billions(8.03e9), billions(124.4e6), billions(1.0277e12)
    ('8.03 B', '0.124 B', '1028 B')
    """
    return f"{_three_digits(count / 1e9)} B"


def latency(us: float) -> str:
    """Formats a time in µs, ms or s, to three significant digits.

    >>> latency(3.456), latency(1234.5), latency(2_500_000)
    ('3.46 µs', '1.23 ms', '2.50 s')
    """
    for factor, unit in ((1, "µs"), (1e3, "ms")):
        if us / factor < 999.5:
            return f"{_three_digits(us / factor)} {unit}"
    return f"{_three_digits(us / 1e6)} s"


def _three_digits(value: float) -> str:
    """Formats a number to three significant digits, or without decimals if it is large."""
    if value <= 0:
        return f"{value:.0f}"
    decimals = max(0, 2 - floor(log10(value)))
    return f"{value:.{decimals}f}"


def with_interval(value: float, half_width: float) -> str:
    """Formats a value and its half-width, rounded to the half-width's first digit.

    The value and the half-width have the same unit.

    >>> with_interval(412.34, 2.1), with_interval(0.12345, 0.0004), with_interval(95.0, 0.0)
    ('412 ±2', '0.1235 ±0.0004', '95.0')
    """
    if half_width <= 0:
        return _three_digits(value)
    decimals = max(0, -floor(log10(half_width)))
    if round(half_width, decimals) >= 10 ** (1 - decimals):  # 0.96 rounds up to 1
        decimals = max(0, decimals - 1)
    return f"{value:.{decimals}f} ±{half_width:.{decimals}f}"


def percent(share: float) -> str:
    """Formats a fraction in percent, with one decimal below 10 %.

    >>> percent(0.0433), percent(0.62)
    ('4.3 %', '62 %')
    """
    value = 100 * share
    decimals = 0 if abs(value) >= 9.95 else 1
    return f"{value:.{decimals}f} %"


def signed_percent(share: float) -> str:
    """Formats a fraction in percent, with its sign.

    >>> signed_percent(0.0433), signed_percent(-0.62)
    ('+4.3 %', '−62 %')
    """
    sign = "−" if share < 0 else "+"
    return sign + percent(abs(share))


def size(count_bytes: float) -> str:
    """Formats a number of bytes in binary units.

    >>> size(80 * 2**30)
    '80.0 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count_bytes < 1024:
            return f"{count_bytes:.1f} {unit}"
        count_bytes /= 1024
    return f"{count_bytes:.1f} TiB"


def dashed(axis: str) -> str:
    """Returns the command line's spelling of an axis: `head-dim` for `head_dim`."""
    return axis.replace("_", "-")


def axis_words(axes: Mapping[str, int | str], equals: str = "=") -> list[str]:
    """Formats each axis with its value.

    >>> axis_words({"hidden": 4096, "head_dim": 128})
    ['hidden=4096', 'head-dim=128']
    """
    return [f"{dashed(name)}{equals}{value}" for name, value in axes.items()]
