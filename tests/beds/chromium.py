"""A real browser without a screen: Chromium, driven by the DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
]
LIMIT = 60.0  # seconds for anything that is waited for


class Chromium:
    """One page in one browser."""

    def __init__(self, to: int, since: int) -> None:
        self._to, self._since = to, since
        self._rest, self._number, self._session = b"", 0, ""
        self.logged: list[str] = []  # errors of the page
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            told = self._read()
            if told.get("id") == self._number:
                assert "error" not in told, told
                found: dict[str, Any] = told["result"]
                return found
            if told.get("method") == "Runtime.exceptionThrown":
                self.logged.append(json.dumps(told["params"]["exceptionDetails"]))
            if told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.logged.append(json.dumps(told["params"]["entry"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._since, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def look(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """The size and the colours of the screen."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives in the page."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true; gives its value."""
        limit = time.monotonic() + LIMIT
        while True:
            found = self.value(f"(() => {{ try {{ return {expression} }} catch (e) {{ return null }} }})()")
            if found:
                return found
            text = self.value("document.body ? document.body.innerText : ''")
            assert time.monotonic() < limit, f"{expression} has not become true; the page says: {text}"
            self.value("new Promise((done) => setTimeout(done, 50))")

    def picture(self, path: Path) -> None:
        """All of the page, as PNG."""
        box = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": box["width"], "height": box["height"], "scale": 1}
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(told["data"]))


@contextmanager
def chromium(folder: Path) -> Iterator[Chromium]:
    """A browser with an empty profile in `folder`."""
    assert PROGRAM is not None
    (commands, to), (since, events) = os.pipe(), os.pipe()
    shell = f'exec "$@" 3<&{commands} 4>&{events}'
    words = ["bash", "-c", shell, "browser", PROGRAM, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        words,
        pass_fds=(commands, events),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(events)
    try:
        yield Chromium(to, since)
    finally:
        os.close(to)  # the browser ends when nobody can command it
        os.close(since)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
