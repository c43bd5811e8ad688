"""A real headless Firefox, spoken to over Marionette, its own remote protocol: JSON after its
length, over TCP.

Protocol: https://firefox-source-docs.mozilla.org/testing/marionette/Protocol.html
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

_SECONDS = 120
# Errors and warnings of the page's scripts and styles in the browser's console.
_CONSOLE = """
const own = m => m instanceof Ci.nsIScriptError && m.sourceName.startsWith('file:');
return Services.console.getMessageArray().filter(own).map(m => m.errorMessage);
"""


def find_firefox() -> str | None:
    """The first Firefox there is."""
    return next((path for name in ("firefox-esr", "firefox") if (path := shutil.which(name))), None)


class Firefox:
    """One running browser with one page."""

    def __init__(self, port: int) -> None:
        end = time.monotonic() + _SECONDS
        while True:
            try:
                self._socket = socket.create_connection(("127.0.0.1", port), timeout=_SECONDS)
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
        self._file = self._socket.makefile("rb")
        self._read()  # greeting
        self._ask(
            "WebDriver:NewSession",
            capabilities={"alwaysMatch": {"timeouts": {"script": 1000 * _SECONDS}}},
        )

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def open(self, address: str) -> None:
        self._ask("WebDriver:Navigate", url=address)

    def evaluate(self, script: str) -> Any:
        """The JSON value of a JavaScript expression; a promise is awaited."""
        return self._ask(
            "WebDriver:ExecuteScript", script=f"return window.eval({json.dumps(script)})", args=[]
        )["value"]

    def problems(self) -> list[str]:
        """Errors and warnings of all pages so far; not calls of `console`, which Firefox itself
        makes besides.
        """
        self._ask("Marionette:SetContext", value="chrome")
        found = self._ask("WebDriver:ExecuteScript", script=_CONSOLE, args=[])["value"]
        self._ask("Marionette:SetContext", value="content")
        return list(found)

    def _ask(self, command: str, **values: Any) -> dict[str, Any]:
        message = json.dumps([0, 1, command, values])
        self._socket.sendall(f"{len(message.encode())}:{message}".encode())
        _, _, error, result = self._read()
        assert error is None, f"{command}: {str(error)[:600]}"
        return dict(result)

    def _read(self) -> Any:
        length = b""
        while not length.endswith(b":"):
            byte = self._file.read(1)
            assert byte, "Firefox went away"
            length += byte
        return json.loads(self._file.read(int(length[:-1])))


@contextmanager
def firefox(path: str, profile: Path) -> Iterator[Firefox]:
    """Start one; it is gone when the context ends. profile: an empty folder for its files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (profile / "user.js").write_text(f'user_pref("marionette.port", {port});\n', encoding="utf-8")
    words = [path, "--headless", "--marionette", "--remote-allow-system-access", "--no-remote"]
    process = subprocess.Popen(
        [*words, "--profile", str(profile)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with closing(Firefox(port)) as found:
            yield found
    finally:
        process.terminate()
        process.wait(timeout=60)
