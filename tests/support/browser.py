"""A headless Chromium, driven by its command line alone."""

import pathlib
import re
import shutil
import subprocess

import pytest

from support.launched import PATIENCE_SECONDS

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def path():
    """The browser; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed (apt install chromium)")
    return found


def run(page, *options, query="", width=1280, height=1600):
    command = [path(), "--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"]
    command += [f"--window-size={width},{height}", *options]
    command += [pathlib.Path(page).as_uri() + query]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def dom(page, **size):
    """The document as the browser holds it after loading."""
    return run(page, "--dump-dom", **size)


def screenshot(page, path, *options, **size):
    run(page, f"--screenshot={path}", *options, **size)


def ask(page, folder, expression, **size):
    """What a script sees in the page, whose own policy allows none, so a copy without it is asked.

    Args:
        page: The page.
        folder: Where the copy goes.
        expression: JavaScript whose value is text or a number.
        size: Of the window.
    """
    text = page.read_text()
    without = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", text, flags=re.DOTALL)
    assert without != text
    script = f"<script>document.title = 'answer: ' + ({expression})</script></body>"
    copy = folder / "copy.html"
    copy.write_text(without.replace("</body>", script))
    return re.search(r"<title>answer: (.*?)</title>", dom(copy, **size), re.DOTALL)[1]


def opening_seconds(page, folder):
    """From the begin of loading until all of the page is parsed and laid out, in the browser."""
    laid_out = "(document.body.offsetHeight, performance.now())"
    return float(ask(page, folder, laid_out)) / 1e3
