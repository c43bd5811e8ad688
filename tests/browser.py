"""A real headless browser, spoken to over Chrome's DevTools pipe: what a page shows, says and asks
the network for.

Protocol: https://chromedevtools.github.io/devtools-protocol/ ; `--remote-debugging-pipe` reads JSON
    messages that end
with a zero byte from file descriptor 3 and writes them to 4.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip
# What reaches beyond the window's right edge, by the element's own box.
OUTSIDE = """
(() => {
  const bottom = selector => document.querySelector(selector)?.getBoundingClientRect().bottom ?? null;
  const beyond = [];
  for (const e of document.body.querySelectorAll('*')) {
    const box = e.getBoundingClientRect();
    if (box.width > 0 && (box.right > innerWidth + 1 || box.left < -1)) beyond.push(e.outerHTML.slice(0, 120));
  }
  return {inner: innerWidth, scroll: document.documentElement.scrollWidth, beyond,
          broken: [...document.images].filter(i => !i.complete || i.naturalWidth === 0).map(i => i.alt),
          images: document.images.length, text: document.body.innerText,
          answer_bottom: bottom('.answer'), first_row_bottom: bottom('table.lead tbody tr')};
})()
"""


def find_browser() -> str | None:
    """The first Chromium there is."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Shown:
    """One page at one width. problems: console messages, exceptions and log entries. requests:
    every address asked for. layout: what OUTSIDE found."""

    layout: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


class Browser:
    """One running browser."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._number = 0
        self._buffer = b""
        self._events: list[dict[str, Any]] = []

    def show(
        self,
        page: Path,
        width: int,
        height: int = 900,
        *,
        dark: bool = False,
        png: Path | None = None,
    ) -> Shown:
        """Load the page and look at it. png: also write a screenshot of all of it here."""
        with self.tab(page, width, height, dark=dark) as tab:
            shown = Shown(layout=tab.evaluate(OUTSIDE))
            if png is not None:
                tab.screenshot(png, whole=True)
            for event in self._events:
                self._sort(event, shown)
        return shown

    @contextmanager
    def tab(
        self, page: Path, width: int, height: int = 900, *, dark: bool = False, fragment: str = ""
    ) -> Iterator[Tab]:
        """Open the page in a tab of its own until the context ends; `Tab.shown` says what it
        complained of.
        """
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable", session)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", session, **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", session, features=[scheme])
        self._events.clear()
        self._ask("Page.navigate", session, url=page.resolve().as_uri() + fragment)
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())
        tab = Tab(self, session)
        # Two frames: what is laid out late is laid out then.
        tab.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"
        )
        yield tab
        self._ask("Target.closeTarget", targetId=target)

    @staticmethod
    def _sort(event: dict[str, Any], shown: Shown) -> None:
        method, values = event.get("method", ""), event.get("params", {})
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            shown.problems.append(json.dumps(values)[:300])
        elif method == "Network.requestWillBeSent":
            shown.requests.append(values["request"]["url"])

    def _ask(self, method: str, session: str | None = None, **values: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._back, 1 << 16)
            if not chunk:
                raise AssertionError("the browser went away")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@dataclass
class Tab:
    """One open page."""

    browser: Browser
    session: str

    def evaluate(self, script: str) -> Any:
        """The JSON value of a JavaScript expression; a promise is awaited."""
        found = self.browser._ask(
            "Runtime.evaluate",
            self.session,
            expression=script,
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in found, str(found["exceptionDetails"])[:600]
        return found["result"].get("value")

    def screenshot(self, png: Path, *, whole: bool = False) -> None:
        image = self.browser._ask(
            "Page.captureScreenshot", self.session, captureBeyondViewport=whole
        )["data"]
        png.write_bytes(base64.b64decode(image))

    @property
    def shown(self) -> Shown:
        """What the page asked for and complained of so far."""
        self.evaluate("0")
        shown = Shown()
        for event in self.browser._events:
            self.browser._sort(event, shown)
        return shown


@contextmanager
def browser(path: str, profile: Path) -> Iterator[Browser]:
    """Start one; it is gone when the context ends. profile: an empty folder for its files."""
    child_reads, to = os.pipe()
    back, child_writes = os.pipe()
    # The browser looks for descriptors 3 and 4: a shell puts them there.
    command = f'exec "$0" "$@" 3<&{child_reads} 4>&{child_writes}'
    words = ["bash", "-c", command, path, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        words,
        pass_fds=(child_reads, child_writes),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(child_reads)
    os.close(child_writes)
    try:
        yield Browser(to, back)
    finally:
        os.close(to)
        os.close(back)
        process.terminate()
        process.wait(timeout=60)
