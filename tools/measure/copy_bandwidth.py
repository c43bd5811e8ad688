"""Measures copy bandwidth, the limit for kernels that read once and write once, such as softmax.

Run it as `python -m tools.measure.copy_bandwidth FILE.json`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quantbench import device
from quantbench.timing import make_timer
from quantbench.timing.options import TimingOptions
from tools.measure.side_by_side import write_json

#: number of bytes that the copy reads, and writes too; many times the size of any last-level cache
COPIED_BYTES = 2**31


def main() -> None:
    """Times one copy and writes the result to FILE.json."""
    from quantbench.providers.inputs import Inputs

    out = Path(sys.argv[1])
    spec = device.current()
    source = Inputs(spec, "normal", 0).tensor(COPIED_BYTES // 2, dtype="fp16")
    target = source.clone()
    timer = make_timer(spec, TimingOptions())
    moved = 2 * COPIED_BYTES

    def copy() -> None:
        target.copy_(source)

    measured = timer.measure(copy, min_bytes=moved)
    time_us = measured.stated.latency_us
    figures = {
        "device": spec.name,
        "bytes_moved": moved,
        "gb_per_s": moved / time_us / 1e3,
        "samples_us": list(measured.samples_us),
    }
    write_json(out, figures)
    print(f"copy of {moved / 2**30:.1f} GiB moved: {figures['gb_per_s']:.0f} GB/s")


if __name__ == "__main__":
    main()
