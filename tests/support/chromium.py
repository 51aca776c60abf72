"""Drives a headless Chromium over its debugging pipe: nothing to install, no port, no socket."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOUND = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

# Chromium reads commands from descriptor 3 and answers on 4.
_LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


class Chromium:
    """A browser with one page at a time.

    Args:
        profile: an empty folder for its files.
    """

    def __init__(self, profile: Path) -> None:
        assert FOUND
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        # Above 4, so that moving one to 3 or 4 does not close the other.
        given = [_above(commands, 10), _above(answers, 10)]
        mine = [f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, *map(str, given), FOUND, *_FLAGS, *mine],
            pass_fds=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for descriptor in given:
            os.close(descriptor)
        self._buffer, self._number, self._session, self._target = b"", 0, "", ""
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(OSError, TimeoutError):
            self.send("Browser.close", page=False)
        for descriptor in (self._write, self._read):
            os.close(descriptor)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Show a file in a fresh page, and wait until it has loaded and been drawn."""
        if self._target:
            self.send("Target.closeTarget", page=False, targetId=self._target)
        self._target = self.send("Target.createTarget", page=False, url="about:blank")["targetId"]
        attached = self.send(
            "Target.attachToTarget", page=False, targetId=self._target, flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.darken(dark)
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri())
        self.wait_for("document.URL !== 'about:blank' && document.readyState === 'complete'")
        # What follows a size (ResizeObserver) is drawn with the first frame, which may come after
        # the end of loading; the second frame is after it.
        frame = "new Promise(requestAnimationFrame)"
        self.value(f"{frame}.then(() => {frame})")

    def darken(self, dark: bool = True) -> None:
        """Say that the system prefers dark pages, or light ones."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def send(self, method: str, *, page: bool = True, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if page:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; what is promised is waited for."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 20) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while not self.value(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(expression)
            time.sleep(0.02)

    def centre(self, selector: str) -> tuple[float, float]:
        """Scroll the first element that matches into view and return its centre."""
        x, y = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return x, y

    def click(self, selector: str) -> None:
        """Click the first element that matches, as a mouse would."""
        x, y = self.centre(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, x, y, button="left", clickCount=1)

    def hover(self, selector: str, across: float = 0.5) -> None:
        """Move the mouse over the first element that matches, `across` of its width."""
        x, y = self.centre(selector)
        width = self.value(
            f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().width"
        )
        self._mouse("mouseMoved", x + (across - 0.5) * width, y)

    def press(self, key: str) -> None:
        """Press a key where the focus is."""
        codes = {"Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        event: dict[str, Any] = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": codes.get(key, 0),
        }
        text: dict[str, Any] = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def screenshot(self, path: Path) -> None:
        """Save the whole page as a picture."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def complaints(self) -> list[str]:
        """Return every console message and exception since the page was opened."""
        self.value("0")  # collects what has arrived
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """Return the addresses that the page has asked for, its own included."""
        self.value("0")
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            piece = os.read(self._read, 1 << 16)
            if not piece:
                raise OSError("the browser has ended")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


def _above(descriptor: int, least: int) -> int:
    import fcntl  # absent on Windows, where these tests are skipped

    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD, least)
    os.close(descriptor)
    return moved
