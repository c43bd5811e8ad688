"""A shape's waste as JUnit XML, for continuous integration: a case per op, and one of the whole for the gate."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from quantbench.advice.cost import OpCost, ShapeCost
from quantbench.junit import clean, write_suite
from quantbench.units import percent


def write_junit(cost: ShapeCost, most: float | None, path: Path) -> None:
    """Write the file. most: the share of the time that may be wasted; None allows any. Raises StoreError where the file
    cannot be written."""
    share = cost.waste_share
    failed = most is not None and share > most
    suite = ElementTree.Element(
        "testsuite", name="quantbench advise", tests=str(len(cost.ops) + 1), failures=str(int(failed)), errors="0",
        skipped="0", time="0",
    )  # fmt: skip
    whole = ElementTree.SubElement(suite, "testcase", classname="quantbench.advise", name="waste past edges", time="0")
    said = f"{percent(share)} of the time is wasted past edges"
    if failed and most is not None:
        message = f"{said}, {percent(most)} allowed"
        ElementTree.SubElement(whole, "failure", message=message, type="waste").text = message
    else:
        ElementTree.SubElement(whole, "system-out").text = said
    for op in cost.ops:
        _add(suite, op, cost)
    write_suite(suite, path)


def _add(suite: ElementTree.Element, op: OpCost, cost: ShapeCost) -> None:
    case = ElementTree.SubElement(
        suite, "testcase", classname="quantbench.advise", name=op.op.label, time=f"{op.latency.latency_us / 1e6:.9f}"
    )
    lines = [f"{op.op.workload}: {percent(op.waste_us / cost.latency.latency_us)} of the whole time wasted"]
    lines += [f"{finding.edge.kind}: {finding.edge.words}" for finding in op.findings]
    ElementTree.SubElement(case, "system-out").text = clean("\n".join(lines))
