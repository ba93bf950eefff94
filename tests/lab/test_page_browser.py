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
    # What Ubuntu has under that name is a script that asks for a snap.
    if (
        program is None
        or subprocess.run([program, "--version"], check=False, capture_output=True).returncode
    ):
        not_run_here("no Chromium: .ci/browser installs it on Debian, as root")
    with Browser(program, tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page([PUBLISHED], tmp_path_factory.mktemp("report"))[0]


def column(browser: Browser, number: int) -> list[str]:
    """What the rows of the first table stand for in a column, from top to bottom."""
    found = browser.run(
        "[...document.querySelector('table.sortable').tBodies[0].rows]"
        f".map((row) => row.cells[{number}].dataset.value)"
    )
    return [str(value) for value in found]


def heading(number: int) -> str:
    return f"table.sortable thead th:nth-child({number + 1}) button"


STALL = 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_the_page_fits_its_window_complains_of_nothing_and_asks_for_nothing(
    browser: Browser, page: Path, size: tuple[int, int], scheme: str
) -> None:
    browser.show(page, size, scheme)
    width, room = browser.run("[document.documentElement.scrollWidth, innerWidth]")
    assert room == size[0]
    assert width <= room
    # Each table scrolls in a box of its own, and the plots are as wide as their place.
    boxes = browser.run(
        "[...document.querySelectorAll('.scroll, .plots svg')].map((e) => {"
        "const b = e.getBoundingClientRect(); return [b.left, b.right, b.height]; })"
    )
    assert len(boxes) == 5
    assert all(left >= 0 and right <= room and height > 60 for left, right, height in boxes)
    assert browser.complaints == []
    assert browser.requests == [page.resolve().as_uri()]


def test_the_page_is_light_or_dark_as_the_reader_wants_it(browser: Browser, page: Path) -> None:
    shades = {}
    for scheme in ("light", "dark"):
        browser.show(page, WIDE, scheme)
        shades[scheme] = browser.run(
            "[getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.querySelector('.plots text')).fill]"
        )
    assert shades["light"] == ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]
    assert shades["dark"] == ["rgb(20, 24, 29)", "rgb(228, 232, 236)"]


def test_a_press_on_a_heading_sorts_and_another_one_turns_the_order(
    browser: Browser, page: Path
) -> None:
    browser.show(page)
    before = column(browser, STALL)
    place = f"JSON.stringify(document.querySelector({heading(STALL)!r}).getBoundingClientRect())"
    browser.press(heading(STALL))
    where = browser.run(place)
    up = column(browser, STALL)
    numbers = [float(value) for value in up if value]
    assert up != before
    assert numbers == sorted(numbers)
    assert len(numbers) == 7
    assert up[-1] == "", "what has no value stands at the end"
    sorts = "[...document.querySelectorAll('th[aria-sort]')].map((e) => [e.cellIndex, e.ariaSort])"
    assert browser.run(sorts) == [[STALL, "ascending"]]
    browser.press(heading(STALL))
    assert browser.run(place) == where, "sorting moved the heading"
    assert column(browser, STALL) == [*reversed(up[:-1]), ""]
    assert browser.run(sorts) == [[STALL, "descending"]]
    browser.press(heading(0))
    names = column(browser, 0)
    assert names == sorted(names, key=str.lower)
    assert browser.run(sorts) == [[0, "ascending"]]
    assert browser.complaints == []


def test_the_keyboard_sorts_as_well(browser: Browser, page: Path) -> None:
    browser.show(page)
    browser.run(f"document.querySelector({heading(STALL - 1)!r}).focus()")
    browser.key("Tab", 9, "")
    browser.key("Enter", 13, "\r")
    numbers = [float(value) for value in column(browser, STALL) if value]
    assert numbers == sorted(numbers)
    assert browser.run("document.activeElement.closest('th').ariaSort") == "ascending"


def test_nothing_moves_while_the_page_loads(browser: Browser, page: Path) -> None:
    browser.show(page)
    moved = browser.run(
        "(() => { const seen = new PerformanceObserver(() => {});"
        "seen.observe({type: 'layout-shift', buffered: true});"
        "return seen.takeRecords().reduce((sum, entry) => sum + entry.value, 0); })()"
    )
    assert moved == 0


def test_filters_leave_what_was_asked_for(
    browser: Browser, tmp_path: Path, bench_record: Callable[..., dict[str, Any]]
) -> None:
    records = [
        bench_record(system, model=model)
        for model in ("gpt2", "bert")
        for system in ("none", "asymcheck", "torch-save", "dcp")
    ]
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    browser.show(write_page([path], tmp_path)[0])
    rows = (
        "[...document.querySelectorAll('table.sortable tbody tr')]"
        ".filter((row) => row.checkVisibility()).map((row) => row.dataset.words)"
    )
    tables = "document.querySelector('form.filters output').value"
    assert (len(browser.run(rows)), browser.run(tables)) == (8, "2 tables")
    browser.press("input[name=kind][value=rival]")
    assert len(browser.run(rows)) == 4
    browser.press("input[name=kind][value=rival]")
    browser.press("input[name=words]")
    browser.ask("Input.insertText", text="DCP")
    assert browser.run(rows) == ["the system dcp dcp"] * 2
    browser.run("document.querySelector('select[name=model]').focus()")
    browser.key("ArrowDown", 40, "")
    assert (len(browser.run(rows)), browser.run(tables)) == (1, "1 table")
    cards = "[...document.querySelectorAll('.card[data-model]')].map((e) => e.checkVisibility())"
    assert browser.run(cards) == [True, False] * 2
    assert browser.complaints == []


def test_hostile_names_run_nothing_in_the_browser(
    browser: Browser, tmp_path: Path, bench_record: Callable[..., dict[str, Any]]
) -> None:
    text = (
        "</title></script></style></svg>\"'><img src=x onerror='hacked=1'><script>hacked=1</script>"
    )
    names = ("model", "size", "store", "title", "library", "omits", "syncs", "command", "commit")
    records = [
        {**bench_record(system), **dict.fromkeys(names, text), "system": system + text}
        for system in ("none", "asymcheck")
    ]
    records.append({**records[1], "system": text, "error": f"{text}\n{text}"})
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    page = write_page([path], tmp_path)[0]
    browser.show(page)
    browser.press(heading(STALL))
    assert browser.run("typeof hacked") == "undefined"
    assert browser.run("document.images.length") == 0
    assert text in browser.run("document.querySelector('table.sortable').innerText")
    assert browser.complaints == []
    assert browser.requests == [page.resolve().as_uri()]


def test_the_picture_of_the_page_shows_more_than_paper(browser: Browser, page: Path) -> None:
    browser.show(page)
    picture = browser.picture()
    assert picture.startswith(b"\x89PNG")
    # A window of one colour takes a few thousand bytes.
    assert len(picture) > 30_000
