"""Writes JUnit XML files for continuous integration."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from quantbench.files import write_file

# Characters that XML 1.0 cannot contain (https://www.w3.org/TR/xml/#charsets). Kernel names and
# messages may have them.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Case:
    """One test case of a JUnit file.

    text: message of a failed or skipped case, or output of a passed case.
    failure: type of the failure; "" if the case did not fail.
    """

    class_name: str
    name: str
    text: str
    time_s: float = 0.0
    failure: str = ""
    skipped: bool = False


def write_suite(
    path: Path, name: str, cases: Sequence[Case], properties: Iterable[tuple[str, object]] = ()
) -> None:
    """Writes one suite of test cases. Characters that XML 1.0 cannot contain become `?`.

    properties: (name, value) pairs of the suite.

    Raises StoreError if the file cannot be written.
    """
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name=_clean(name),
        tests=str(len(cases)),
        failures=str(sum(bool(case.failure) for case in cases)),
        errors="0",
        skipped=str(sum(case.skipped for case in cases)),
        time="0",
    )
    pairs = list(properties)
    if pairs:
        listed = ElementTree.SubElement(suite, "properties")
        for key, value in pairs:
            ElementTree.SubElement(listed, "property", name=_clean(key), value=_clean(str(value)))
    for case in cases:
        text = _clean(case.text)
        names = {
            "classname": _clean(case.class_name),
            "name": _clean(case.name),
            "time": f"{case.time_s:.9f}",
        }
        element = ElementTree.SubElement(suite, "testcase", names)
        if case.failure:
            ElementTree.SubElement(element, "failure", message=text, type=case.failure).text = text
        elif case.skipped:
            ElementTree.SubElement(element, "skipped", message=text)
        else:
            ElementTree.SubElement(element, "system-out").text = text
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    write_file("write JUnit", path, text)


def _clean(text: str) -> str:
    return _NO_XML.sub("?", text)
