"""Writes JUnit XML files, which continuous integration reads.

Called by `report.comparison` (of a comparison) and `advice.report` (of a shape's waste).
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from quantbench.errors import StoreError

# Characters that XML 1.0 cannot hold (https://www.w3.org/TR/xml/#charsets); kernel names and messages may have them.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_suite(suite: ElementTree.Element, path: Path) -> None:
    """Write a file of one suite. Raises StoreError where it cannot be written."""
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise StoreError("write JUnit", f"{path} ({error.strerror})", "a file that can be written") from None


def clean(text: str) -> str:
    """Text without what XML 1.0 cannot hold."""
    return _NO_XML.sub("?", text)
