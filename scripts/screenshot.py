#!/usr/bin/env python3
"""Take the pictures of the dashboard in the documents: scripts/screenshot.py [FOLDER], by default docs/images.

Needs Chromium, and quire in the environment that runs it. The server is that of the demonstration, with its simulated
users. The script waits for a moment with much to see: several requests run, and some of their blocks are shared.
"""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import Browser, Page  # noqa: E402 (needs the change of sys.path)

WIDTH, HEIGHT = 1360, 1045
WARM_UP_S = 62.0
QUESTION = "What is a block table?"
IS_BUSY = "quire.model.requests.size >= 5 && quire.model.memory.counts[2] >= 4 && quire.model.memory.counts[1] >= 70"


def take(page: Page, folder: Path) -> None:
    """Ask a question, wait until there is much to see, and write a picture for each theme."""
    page.wait_for("window.quire?.phase === 'live' && quire.model?.numFrames > 0")
    time.sleep(WARM_UP_S)
    page.click("#chat-text")
    page.type(QUESTION)
    page.press("Enter")
    page.wait_for("!quire.chat.call && quire.chat.messages.length === 2")
    page.move("h1")
    for theme in ("light", "dark"):
        page.prefer(prefers_color_scheme=theme)
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.wait_for(IS_BUSY, 150.0)
        page.screenshot(folder / ("dashboard.png" if theme == "light" else "dashboard-dark.png"), whole=False)


def main(arguments: list[str]) -> int:
    """Serve the demonstration and take its picture."""
    folder = Path(arguments[0]) if arguments else ROOT / "docs" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "quire", "demo", "--fast", "--serve-for", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
            with Browser() as browser:
                page = Page(browser, WIDTH, HEIGHT)
                page.goto(address)
                take(page, folder)
        finally:
            server.send_signal(signal.SIGINT)
            server.stdout.read()
    return server.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
