"""A real browser for the tests of the page, and the servers that it looks at."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright
from scripts.browser import find_browser

from .processes import quiet_environment

TOKEN = "a-token-of-the-tests"
TIMEOUT_MS = 30_000
"""How long a condition may take to become true, on a machine that is busy."""
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")


@contextmanager
def a_browser() -> Iterator[Browser]:
    program = find_browser()
    assert program is not None, "the tests of the page need Chromium: python -m scripts.browser"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def paddock(*arguments: str, token_option: str = "--auth-token") -> Iterator[str]:
    """A paddock command that serves, by the address of its server."""
    command = [sys.executable, "-m", "paddock", *arguments, "--port", "0", token_option, TOKEN, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=quiet_environment())
    try:
        assert process.stdout is not None
        yield str(json.loads(process.stdout.readline())["url"]).partition("/web")[0]
    finally:
        process.terminate()
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def a_page(browser: Browser, url: str, **options: object) -> Iterator[Page]:
    """A visitor who came with the token. Whatever the page complains about fails the test."""
    context = browser.new_context(**options)  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    expect.set_options(timeout=TIMEOUT_MS)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.goto(f"{url}/web/?token={TOKEN}")
    page.wait_for_selector("main > *")
    yield page
    context.close()
    assert complaints == [], complaints


def save(download: object, folder: Path) -> Path:
    target = folder / "shared.html"
    download.save_as(target)  # type: ignore[attr-defined]
    return target
