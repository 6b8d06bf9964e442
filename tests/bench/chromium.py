"""A headless Chromium, controlled through its debugging pipe.

    with Chromium(find_chromium(), tmp_path) as browser:
        browser.look(page, width=360, picture=tmp_path / "360.png").overflow  # 0

It opens an HTML file, saves a screenshot of the whole page and returns its measurements. The
protocol is described at chromedevtools.github.io/devtools-protocol; on a pipe, messages end with a
zero byte. A window is at least 500 pixels wide, but an emulated device can be narrower.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_WIDEST = """
JSON.stringify({
  page: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  wide: [...document.querySelectorAll('body *')]
    .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5
                 && !e.closest('.table table'))
    .map(e => e.tagName + ' ' + e.textContent.trim().slice(0, 40)),
  tiny: Math.min(99, ...[...document.querySelectorAll('figure img')]
    .map(e => e.naturalWidth ? 17 * e.getBoundingClientRect().width / e.naturalWidth : 0)),
  ids: [...document.querySelectorAll('[id]')].map(e => e.id)
    .filter((id, i, all) => all.indexOf(id) !== i),
  height: document.documentElement.scrollHeight,
  medians: Math.max(0, ...[...document.querySelectorAll('td[data-label=median]')]
    .map(e => e.getBoundingClientRect().right)),
})
"""


def find_chromium() -> str:
    """Return the path of Chromium or Chrome; empty if none is installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), "")


@dataclass
class Look:
    """Measurements of a rendered page."""

    overflow: int
    """Pixels by which the page is wider than the window."""
    wide: list[str]
    """Elements that extend beyond the window."""
    smallest_text: float
    """Height of text of 10 points in the figures, in pixels; 0 if a figure is not displayed."""
    repeated_ids: list[str]
    medians: float
    """Right edge of the column of medians, in pixels; 0 without such a column."""
    logged: list[str]
    """Errors and warnings on the console, and requests to other addresses."""


class Chromium:
    def __init__(self, program, scratch):
        down, self._write = os.pipe()
        self._read, up = os.pipe()

        def descriptors():  # the browser reads from 3 and writes to 4
            kept = os.dup(down), os.dup(up)
            os.dup2(kept[0], 3)
            os.dup2(kept[1], 4)

        self._process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--disable-dev-shm-usage",
                "--remote-debugging-pipe",
                "--no-first-run",
                f"--user-data-dir={scratch / 'profile'}",
                "about:blank",
            ],
            preexec_fn=descriptors,  # noqa: PLW1509  one thread
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(down)
        os.close(up)
        self._count = 0
        self._pending = b""
        self.events = []
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable", session=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def look(self, page: Path, *, width: int, picture: Path, dark: bool = False) -> Look:
        self.events.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", session=True, features=[scheme])
        self._resize(width, 800)
        self.ask("Page.navigate", session=True, url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()
        found = self.ask("Runtime.evaluate", session=True, expression=_WIDEST)
        seen = json.loads(found["result"]["value"])
        self._resize(width, min(seen["height"], 12000))
        shot = self.ask("Page.captureScreenshot", session=True, format="png")
        picture.write_bytes(base64.b64decode(shot["data"]))
        return Look(
            seen["page"],
            seen["wide"],
            seen["tiny"],
            seen["ids"],
            seen["medians"],
            self._logged(),
        )

    def ask(self, method, *, session=False, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._count:
                assert "error" not in found, found
                return found["result"]

    def _resize(self, width, height):
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            session=True,
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )

    def _receive(self):
        while b"\0" not in self._pending:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def _logged(self):
        logged = []
        for event in self.events:
            kind, params = event["method"], event["params"]
            if kind in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                logged.append(json.dumps(params)[:300])
            elif kind == "Log.entryAdded":
                logged.append(params["entry"]["text"])
            elif kind == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:")):
                    logged.append(url)
        return logged
