"""A headless Chromium that a test can ask, through the DevTools protocol over pipes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
FLAGS += ("--disable-component-update", "--disable-sync", "--remote-debugging-pipe", "--no-sandbox")
SECONDS = 20
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Tab": 9}


def browser_path() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page; requests that it makes are in ``requests``."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._numbers = write, read, count(1)
        self._session, self._left = "", b""
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self._call(f"{domain}.enable")

    def open(self, address: str) -> None:
        self._call("Page.navigate", url="about:blank")  # so that another part of the same page is loaded anew
        self._call("Page.navigate", url=address)
        ended = time.monotonic() + SECONDS
        while (
            self.tell("document.readyState + (document.getElementById('rows')?.children.length > 0)") != "completetrue"
        ):
            assert time.monotonic() < ended, "the page did not load"
            time.sleep(0.02)

    def tell(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            read = os.read(self._read, 1 << 16)
            assert read, "the browser has ended"
            self._left += read
        whole, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(whole)
        return message


@contextmanager
def opened(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile; it reads its commands from file 3 and writes to file 4."""
    (their_read, write), (read, their_write) = os.pipe(), os.pipe()
    arguments = [str(browser_path()), *FLAGS, f"--user-data-dir={profile}"]

    def put_in_place() -> None:
        high = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (their_read, their_write)]
        for number, one in enumerate(high, start=3):
            os.dup2(one, number)

    process = subprocess.Popen(arguments, preexec_fn=put_in_place, pass_fds=(3, 4), stderr=subprocess.DEVNULL)
    os.close(their_read)
    os.close(their_write)
    try:
        yield Page(write, read)
    finally:
        process.kill()
        process.wait()
        os.close(write)
        os.close(read)
