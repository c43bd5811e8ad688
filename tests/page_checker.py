"""A written page, checked to be well formed, to load nothing and to run nothing of its own."""

from __future__ import annotations

import html.parser
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from quantbench.report.page import template_text

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Checker(html.parser.HTMLParser):
    """Raises for tags that do not nest; keeps tags, addresses and the visible text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a start"
        assert self.open[-1] == tag, f"</{tag}> inside <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
            self.text += data


def checked(page: Path) -> Checker:
    """The page, found to be well formed, to load nothing and to run nothing but the packaged
    script.
    """
    checker = Checker()
    checker.feed(page.read_text(encoding="utf-8"))
    checker.close()
    assert checker.open == []
    assert not checker.tags & {"iframe", "object", "embed", "form", "base", "audio", "video"}
    for tag, name, value in checker.attributes:
        assert not name.startswith("on"), f"{tag} has {name}"
        if name in ("src", "href", "srcset", "data", "action", "poster", "background"):
            assert value is not None
            assert value.startswith(("data:", "#")), f"{tag} {name}={value[:60]}"
    policy = next(
        value
        for tag, name, value in checker.attributes
        if tag == "meta" and value and "default-src" in value
    )
    own = "\n".join(template_text(name) for name in ("uplot.min.js", "charts.js"))
    assert "".join(checker.scripts) in ("", own)
    if checker.scripts:
        assert f"script-src 'sha256-{b64encode(sha256(own.encode()).digest()).decode()}'" in policy
    else:
        assert "script-src" not in policy
    style = page.read_text(encoding="utf-8").partition("<style>")[2].partition("</style>")[0]
    assert not re.search(r"url\(|@import|https?:", style)
    return checker
