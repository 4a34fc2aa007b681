"""Takes the pictures of the web page that the documentation shows: `python -m scripts.pictures [NAME…]`.

It runs rollouts of the shipped tasks with scripted models into a store of its own, serves that store, and visits each
view with Chromium. So the pictures show the page as it is. Needs bubblewrap and Chromium; takes two minutes.
"""

import asyncio
import json
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, sync_playwright

from paddock.agents import find_agent
from paddock.rollouts import RunConfig, fork, run_batch
from paddock.rollouts.demo import demo_script
from scripts.browser import HINT, find_browser

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
MOST_BYTES = 200_000
TOKEN = "a-token-of-the-pictures"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")

LEARNER = "mini-swe-agent"
LEARNED = {"small": (1, 1, 2, 2, 3), "large": (2, 2, 3, 4, 5)}
"""How many of the shipped tasks each model solves with each weight version."""

SUMMARY = """## Both bugs are corrected

| function | what was wrong | now |
|:--|:--|:--|
| `merge` | the end of the last interval won | the **larger** end wins |
| `gaps` | intervals outside the range were kept | each interval is clipped first |

```python
merged[-1] = (merged[-1][0], max(merged[-1][1], end))
```

1. All seven tests pass.
2. `test_intervals.py` is unchanged.
"""
TESTS = {"tool": "bash", "arguments": {"command": "python3 -m unittest test_intervals"}}
CLIPPED = "    for left, right in merge((max(a, start), min(b, end)) for a, b in intervals):\n"


def edit(old: str, new: str) -> dict[str, Any]:
    edits = [{"oldText": old, "newText": new}]
    return {"tool": "edit", "arguments": {"path": "intervals.py", "edits": edits}}


BEGINNING: list[dict[str, Any]] = [
    {"text": "I read the module first.", "tool": "read", "arguments": {"path": "intervals.py"}},
    {"thinking": "Two of the tests fail. Which?", **TESTS},
    {
        "text": "`merge` keeps the end of the *last* interval, even if an earlier one reaches further.",
        **edit("(merged[-1][0], end)", "(merged[-1][0], max(merged[-1][1], end))"),
    },
]
CAREFUL = [
    *BEGINNING,
    {"text": "I run the tests again before I go on.", **TESTS},
    {
        "thinking": "`gaps` never looks at its range.",
        "text": "One is left: `gaps` has to clip each interval to its range.",
        **edit("    for left, right in merge(intervals):\n", CLIPPED),
    },
    TESTS,
    {"text": SUMMARY},
]
HASTY = [*BEGINNING, {"text": "I run no tests again before I finish: `merge` is **corrected**."}]
UNDECIDED = [*BEGINNING, TESTS, {"text": "One test still fails. I could not find out why."}]

# -- the store --------------------------------------------------------------------------------------


async def fill_store(store: Path, folder: Path) -> dict[str, str]:
    """Rollouts to look at, by name."""

    async def play(name: str, turns: list[dict[str, Any]], **rest: Any) -> str:
        config = RunConfig(
            model=write_script(folder, name, {"turns": turns, **rest}),
            agent="pi",
            store=store,
            top_logprobs=5,
            snapshots=True,
        )
        return (await run_batch("fix-test", config)).records[0].rollout_id

    await learn(store, folder)
    await play("broken", CAREFUL, faults=[{"turn": 2, "status": 503, "times": 99}])
    hasty, careful = await play("hasty", HASTY), await play("careful", CAREFUL)
    for name, turns in (("careful", CAREFUL), ("undecided", UNDECIDED)):
        model = write_script(folder, name, {"turns": turns})
        await fork(hasty, at=3, model=model, store=store, n=2 if name == "careful" else 1)
    return {"hasty": hasty, "careful": careful}


async def learn(store: Path, folder: Path) -> None:
    """Batches of two models whose later weights solve more of the tasks."""
    agent = find_agent(LEARNER)
    solved = demo_script(agent.name, agent.tools)["tasks"]
    finish = solved[0]["turns"][-1]
    for version in range(len(LEARNED["small"])):
        for name, counts in LEARNED.items():
            given_up = {"turns": [{**finish, "text": "I found nothing to change."}]}
            script = {"tasks": [*solved[: counts[version]], given_up]}
            config = RunConfig(agent=LEARNER, store=store, model=write_script(folder, name, script), parallel=2)
            await run_batch("shipped", config, weight_version=version)


def write_script(folder: Path, name: str, script: Mapping[str, Any]) -> str:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(script))
    return f"replay:{file}"


# -- the pictures -----------------------------------------------------------------------------------


@contextmanager
def serve(store: Path) -> Iterator[str]:
    command = ["view", "--store", str(store), "--no-open", "--port", "0", "--auth-token", TOKEN, "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paddock", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        yield str(json.loads(process.stdout.readline())["url"])
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def take(
    browser: Browser,
    url: str,
    place: str,
    *,
    width: int = 1280,
    height: int = 800,
    below: int = 0,
    dark: bool = False,
) -> bytes:
    """One view of the page, `below` pixels from its top."""
    scheme: Literal["dark", "light"] = "dark" if dark else "light"
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("main > *")
    page.evaluate("place => location.hash = place", place)
    page.wait_for_selector("main:not([aria-busy]) > .view")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(500)
    page.evaluate("below => scrollTo(0, below)", below)
    page.wait_for_timeout(300)
    picture = page.screenshot()
    context.close()
    return picture


def views(ids: Mapping[str, str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The place of each picture, and how it is taken."""
    careful, hasty = f"#/rollouts/{ids['careful']}", f"#/rollouts/{ids['hasty']}"
    return {
        "rollouts": ("#/rollouts?by=weights&split=model", {}),
        "batches": ("#/batches", {}),
        "transcript": (careful, {}),
        "transcript-dark": (careful, {"dark": True, "below": 2400}),
        "phone": (careful, {"width": 390, "below": 700}),
        "timeline": (f"{careful}/timeline", {}),
        "tokens": (f"{careful}/tokens/c4", {"height": 620}),
        "tree": (f"{hasty}/tree", {"height": 480}),
        "compare": (f"#/compare/{ids['hasty']}/{ids['careful']}", {"below": 300}),
    }


def main(names: Sequence[str]) -> int:
    program = find_browser()
    if program is None:
        print(f"the pictures need a browser: {HINT}", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        ids = asyncio.run(fill_store(store, Path(scratch)))
        with serve(store) as url, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
            for name, (place, options) in views(ids).items():
                if not names or name in names:
                    save(FOLDER / f"{name}.png", take(browser, url, place, **options))
            browser.close()
    return 0


def save(file: Path, picture: bytes) -> None:
    content = shrink(picture)
    if len(content) > MOST_BYTES:
        raise SystemExit(f"{file.name} has {len(content):,} bytes, more than {MOST_BYTES:,}")
    file.write_bytes(content)
    print(f"{file.name}: {len(content) / 1000:.0f} kB", file=sys.stderr)


def shrink(picture: bytes) -> bytes:
    """The same PNG, compressed as far as zlib can. The filters of its lines stay."""
    header, parts, at = picture[:8], [], 8
    while at < len(picture):
        (length,) = struct.unpack(">I", picture[at : at + 4])
        parts.append((picture[at + 4 : at + 8], picture[at + 8 : at + 8 + length]))
        at += 12 + length
    pixels = zlib.compress(zlib.decompress(b"".join(data for kind, data in parts if kind == b"IDAT")), 9)
    first, *_ = (data for kind, data in parts if kind == b"IHDR")
    chunks = ((b"IHDR", first), (b"IDAT", pixels), (b"IEND", b""))
    smaller = header + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return min(smaller, picture, key=len)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
