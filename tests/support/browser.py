"""Chromium without a window, driven over a pipe in the protocol of its developer tools.

    Browser ──► Page.goto, click, press, type, resize ──► evaluate: what the page then says
                  └──► complaints: what the console, the network or the content policy had to say

Messages are JSON, each ended by a zero byte, on file descriptors 3 and 4 of the browser: no port, no driver to install.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # a container has no right to make one
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "about:blank",
)
KEYS = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    "Home": (36, ""),
    "End": (35, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
    " ": (32, " "),
}
SHIFT = 8
WAIT_S = 30.0

CONTRAST = """(() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const colour = parts(getComputedStyle(one).backgroundColor);
      if (colour[3] === undefined || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const one of document.querySelectorAll("body *")) {
    const isText = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!isText || one.disabled || !one.checkVisibility()) continue;
    const [a, b] = [light(parts(getComputedStyle(one).color)), light(behind(one))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${one.tagName} ${one.className} ${one.innerText.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return poor;
})()"""
"""The elements whose text stands out too little from what is behind it."""

OVERFLOW = """[...document.querySelectorAll("body *")].filter((one) => one.checkVisibility()
  && one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".scroll, .u-wrap, .spoken, .skip"))
  .map((one) => `${one.tagName}.${one.className}`)"""
"""The elements that reach beyond the right edge, where nothing scrolls."""


class Browser:
    """A browser of our own; it has ended when its `with` block is left."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._folder = tempfile.mkdtemp(prefix="quire-browser-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        command = ["bash", "-c", script, "browser", CHROMIUM, f"--user-data-dir={self._folder}", *OPTIONS]
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._rest = b""
        self._messages = deque[bytes]()  # read, and not yet taken
        self._last_id = 0
        self.listeners: dict[str, Callable[[str, Mapping[str, Any]], None]] = {}  # by the id of a session

    def call(self, method: str, session: str = "", **fields: Any) -> Any:
        """Call a method; events that come meanwhile are told. Raises what the browser refuses."""
        self._last_id += 1
        number = self._last_id
        message = {"id": number, "method": method, "params": fields} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            found = self._take()
            if found.get("id") == number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                return found["result"]

    def _take(self) -> dict[str, Any]:
        pieces = [self._rest]
        while not self._messages:
            pieces.append(os.read(self._read, 1 << 20))
            if not pieces[-1]:
                raise RuntimeError("the browser has ended")
            if b"\0" in pieces[-1]:
                *whole, self._rest = b"".join(pieces).split(b"\0")
                self._messages.extend(whole)
        message: dict[str, Any] = json.loads(self._messages.popleft())
        if "method" in message:
            listener = self.listeners.get(message.get("sessionId", ""))
            if listener is not None:
                listener(message["method"], message["params"])
        return message

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._folder, ignore_errors=True)


class Page:
    """A page of a browser, in a context of its own: no key, no theme and no cache of another."""

    def __init__(self, browser: Browser, width: int = 1440, height: int = 1000) -> None:
        self._browser = browser
        context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self._context = context
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.complaints: list[str] = []
        self.requests: list[str] = []  # addresses that the page has asked for, its own first
        browser.listeners[self._session] = self._hear
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def call(self, method: str, **fields: Any) -> Any:
        """Call a method of the page."""
        return self._browser.call(method, self._session, **fields)

    def close(self) -> None:
        """Close the page and forget what it has stored."""
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def _hear(self, method: str, fields: Mapping[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = fields["exceptionDetails"]
            self.complaints.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif method == "Runtime.consoleAPICalled" and fields["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([argument.get("value") for argument in fields["args"]]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(fields["request"]["url"])
        elif method == "Log.entryAdded" and fields["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{fields['entry']['text']} {fields['entry'].get('url', '')}")

    # ---- what a person does ---------------------------------------------------------------------------------------

    def goto(self, url: str) -> None:
        """Open an address and wait until it has loaded."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href !== 'about:blank' === {json.dumps(url != 'about:blank')} && "
                      "document.readyState === 'complete'")  # fmt: skip

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Give the window a size, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def prefer(self, **features: str) -> None:
        """Set what the system of the user prefers: `prefers_color_scheme="dark"`."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Click at a place of an element, given as shares of its size."""
        self.move(selector, x, y)
        left, top = self.place(selector, x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=left, y=top, button="left", clickCount=1)

    def move(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Move the mouse over a place of an element."""
        left, top = self.place(selector, x, y)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=left, y=top)

    def press(self, key: str, *, times: int = 1, shift: bool = False) -> None:
        """Press a key."""
        code, text = KEYS[key]
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": SHIFT if shift else 0}
        for _ in range(times):
            self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **fields)
            self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def type(self, text: str) -> None:
        """Write a text where the focus is."""
        self.call("Input.insertText", text=text)

    def choose_files(self, selector: str, *paths: Path) -> None:
        """Choose files for an input, as in the dialog that it opens."""
        expression = f"document.querySelector({json.dumps(selector)})"
        found = self.call("Runtime.evaluate", expression=expression)["result"]["objectId"]
        self.call("DOM.setFileInputFiles", objectId=found, files=list(map(str, paths)))

    def place(self, selector: str, x: float, y: float) -> tuple[float, float]:
        """Return where a place of an element is in the window, and bring it there."""
        box = self.evaluate(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); "
            "one.scrollIntoView({block: 'center'}); const box = one.getBoundingClientRect(); "
            "return [box.x, box.y, box.width, box.height]; })()"
        )
        return box[0] + x * box[2], box[1] + y * box[3]

    # ---- what is seen ---------------------------------------------------------------------------------------------

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']['exception'].get('description')}")
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def wait_for(self, expression: str, seconds: float = WAIT_S) -> Any:
        """Wait until an expression is true; returns its value, True for an element."""
        valued = f"((value) => value instanceof Node || value)({expression})"
        end = time.monotonic() + seconds
        while not (value := self.evaluate(valued)):
            assert time.monotonic() < end, f"it did not come to be so: {expression}; complaints: {self.complaints}"
            time.sleep(0.05)
        return value

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the page: all of it, or what the window shows."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))


@contextmanager
def opened(url: str, width: int = 1440, height: int = 1000) -> Iterator[Page]:
    """A page at an address, in a browser that ends with the context."""
    with Browser() as browser:
        page = Page(browser, width, height)
        page.goto(url)
        yield page
