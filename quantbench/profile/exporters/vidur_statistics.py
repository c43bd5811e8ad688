"""The min, max, mean, median and std columns that Vidur expects for each operation."""

_NAMES = ("min", "max", "mean", "median", "std")


def statistics(latency_us: dict[str, float]) -> dict[str, float]:
    """`time_stats.<op>.<name>` in milliseconds. There is one figure: its spread is 0, and all others are equal.

    >>> statistics({"add": 3.0})["time_stats.add.median"]
    0.003
    """
    return {
        f"time_stats.{op}.{name}": 0.0 if name == "std" else us / 1e3
        for op, us in latency_us.items()
        for name in _NAMES
    }
