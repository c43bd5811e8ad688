"""A comparison as JUnit XML, for continuous integration: a slower or failing point is a failure, an unclear one is
skipped with its reason."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from quantbench.analysis.compare import Compared, Comparison
from quantbench.junit import clean, write_suite
from quantbench.report.compare_table import place_words
from quantbench.units import latency


def write_junit(comparison: Comparison, path: Path) -> None:
    """Write the file. Raises StoreError where it cannot be written."""
    total = len(comparison.points) + len(comparison.lost)
    suite = ElementTree.Element(
        "testsuite",
        name=clean(f"quantbench compare {comparison.b.info.device.name}"),
        tests=str(total),
        failures=str(comparison.regressions),
        errors="0",
        skipped=str(comparison.counts["unclear"]),
        time="0",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("a", comparison.a.folder), ("b", comparison.b.folder), ("tolerance", comparison.tolerance)):
        ElementTree.SubElement(properties, "property", name=name, value=clean(str(value)))
    for difference in comparison.differences:
        ElementTree.SubElement(properties, "property", name="difference", value=clean(str(difference)))
    for point in comparison.points:
        _add_point(suite, point)
    for lost in comparison.lost:
        case = _case(suite, place_words(lost.place), lost.record.provider, 0.0)
        message = clean(f"measured before, fails now: {lost.kind}: {lost.message}")
        ElementTree.SubElement(case, "failure", message=message, type="lost").text = message
    write_suite(suite, path)


def _add_point(suite: ElementTree.Element, point: Compared) -> None:
    case = _case(suite, place_words(point.place), point.b.provider, point.b_us / 1e6)
    interval = "no interval" if point.low is None else f"95 % interval {point.low:.4f} to {point.high:.4f}"
    text = f"{point.verdict}: {latency(point.a_us)} → {latency(point.b_us)}, ratio {point.ratio:.4f}, {interval}"
    if point.why:
        text += f"; {point.why}"
    if point.verdict == "slower":
        ElementTree.SubElement(case, "failure", message=clean(text), type="slower").text = clean(text)
    elif point.verdict == "unclear":
        ElementTree.SubElement(case, "skipped", message=clean(text))
    else:
        ElementTree.SubElement(case, "system-out").text = clean(text)


def _case(suite: ElementTree.Element, name: str, provider: str, time_s: float) -> ElementTree.Element:
    return ElementTree.SubElement(
        suite, "testcase", classname=clean(f"quantbench.{provider}"), name=clean(name), time=f"{time_s:.9f}"
    )
