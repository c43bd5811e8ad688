"""Writes a comparison of two runs as JUnit XML, which CI systems read as test results."""

import re
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from quantbench.analysis.compare import Comparison
from quantbench.files import write_file
from quantbench.report.comparison import failure_words, grid_position_words
from quantbench.store.record import GridPosition, Record
from quantbench.units import latency

# Characters that XML 1.0 does not allow (https://www.w3.org/TR/xml/#charsets), although kernel
# names and messages may contain them.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(comparison: Comparison, path: Path) -> None:
    """Writes a comparison as JUnit XML, with one test case per point.

    Slower points are failures, and so are points that fail only in the second run. Unclear points
    are skipped cases with the reason. All other points pass. Characters that XML 1.0 does not allow
    become `?`.

    Raises StoreError if the file cannot be written.
    """
    root = Element("testsuites")
    suite = SubElement(
        root,
        "testsuite",
        name=f"quantbench compare {comparison.b.info.device.name}",
        tests=str(len(comparison.points) + len(comparison.lost)),
        failures=str(comparison.regressions),
        errors="0",
        skipped=str(comparison.counts["unclear"]),
        time="0",
    )
    properties = [
        ("a", comparison.a.folder),
        ("b", comparison.b.folder),
        ("tolerance", comparison.tolerance),
    ]
    for difference in comparison.differences:
        properties.append(("difference", difference))
    listed = SubElement(suite, "properties")
    for name, value in properties:
        SubElement(listed, "property", name=name, value=str(value))
    for point in comparison.points:
        times = f"{latency(point.a_us)} → {latency(point.b_us)}, ratio {point.ratio:.4f}"
        interval = "no interval"
        if point.low is not None:
            interval = f"95 % interval {point.low:.4f} to {point.high:.4f}"
        text = f"{point.change}: {times}, {interval}"
        if point.why:
            text += f"; {point.why}"
        case = _case(suite, point.b, point.place, point.b_us / 1e6)
        if point.change == "slower":
            SubElement(case, "failure", message=text, type="slower").text = text
        elif point.change == "unclear":
            SubElement(case, "skipped", message=text)
        else:
            SubElement(case, "system-out").text = text
    for lost in comparison.lost:
        text = f"measured before, fails now: {failure_words(lost)}"
        case = _case(suite, lost.b, lost.place, 0.0)
        SubElement(case, "failure", message=text, type="lost").text = text
    indent(root)
    write_file("write JUnit", path, _NO_XML.sub("?", tostring(root, encoding="unicode")))


def _case(suite: Element, record: Record, place: GridPosition, time_s: float) -> Element:
    """Adds a test case, which is named after provider and grid point, and returns the case."""
    return SubElement(
        suite,
        "testcase",
        classname=f"quantbench.{record.provider}",
        name=grid_position_words(place),
        time=f"{time_s:.9f}",
    )
