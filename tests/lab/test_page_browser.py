"""The page in a real browser: what it shows, what a press of a button does, what it complains of.

Chromium is spoken to over a pipe in its own protocol (Chrome DevTools Protocol): messages are JSON
with a zero byte behind each. That needs no driver beside the browser.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from select import select
from time import monotonic
from typing import Any, NoReturn, Self

import pytest

from asymcheck_lab.page import write_page

pytestmark = pytest.mark.extra

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "results" / "bench.jsonl"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT_S = 60.0
WIDE, NARROW = (1400, 900), (390, 844)


class Browser:
    """One page of a headless Chromium. Every wait is bounded; ``close`` ends the process."""

    def __init__(self, program: str, folder: Path) -> None:
        theirs, self._out = os.pipe()
        self._in, ours = os.pipe()
        arguments = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={folder}",
            "--remote-debugging-pipe",
        ]
        # The browser reads from descriptor 3 and writes to 4.
        script = f'exec "$@" 3<&{theirs} 4>&{ours}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, "bash", *arguments],
            pass_fds=(theirs, ours),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(ours)
        self._rest = b""
        self._count = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)
        os.close(self._in)
        os.close(self._out)

    def _message(self) -> dict[str, Any]:
        end_s = monotonic() + WAIT_S
        while b"\0" not in self._rest:
            ready, _, _ = select([self._in], [], [], max(0.0, end_s - monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            assert data, "the browser has ended or says nothing"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; what the browser reports meanwhile is kept."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._count:
                assert "error" not in message, message
                return dict(message["result"])
            self.events.append(message)

    def wait_for(self, method: str) -> None:
        """Return once it was reported."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._message())

    def show(self, page: Path, size: tuple[int, int] = WIDE, scheme: str = "light") -> None:
        """Load a page into a window of ``size`` pixels."""
        self.events.clear()
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=size[0],
            height=size[1],
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=features)
        self.ask("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, selector: str) -> None:
        """A real press of the mouse in the middle of an element."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', inline: 'center'});"
            "const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, name: str, code: int, text: str) -> None:
        """A real press of a key."""
        shared = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        self.ask("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **shared)

    def picture(self, *, whole: bool = False) -> bytes:
        """What the window shows, or the whole page, as PNG."""
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])

    @property
    def complaints(self) -> list[str]:
        """Everything that the page said on the console, and every exception in it."""
        names = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(e) for e in self.events if e.get("method") in names]

    @property
    def requests(self) -> list[str]:
        """Every address that the page asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]


@pytest.fixture(scope="module")
def browser(
    tmp_path_factory: pytest.TempPathFactory, not_run_here: Callable[[str], NoReturn]
) -> Iterator[Browser]:
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        not_run_here("no Chromium: .ci/browser installs it on Debian, as root")
    with Browser(program, tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page([PUBLISHED], tmp_path_factory.mktemp("report"))[0]
