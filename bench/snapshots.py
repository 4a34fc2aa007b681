"""What snapshots of the work folder cost.

    python -m bench.snapshots [rollout|scan] [--rounds 5] [--agent small]

rollout  A rollout of 50 calls with a work folder of 10 MB, each of whose calls changes a file, with and without
         `--snapshots` in turns. `--agent opencode` (the default) is the real agent; `small` is a loop that does
         nothing but call the model and run the tool, the worst case.
scan     One scan of that folder with nothing changed, of one with 20,000 files, and the first scan of each.

Needs bubblewrap, and OpenCode in the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.rollouts import ReportRow
from paddock.rollouts.api import run_batch
from paddock.rollouts.config import RunConfig
from paddock.sandbox.folder_scan import FolderScan, ScanOptions, scan_folder
from paddock.store import Store
from paddock.tasks.task import Task

if TYPE_CHECKING:
    from paddock.store.record import RolloutRecord

CALLS = 50
FILES, FILE_BYTES = 500, 20 * 1024
MANY_FILES = 19_000
SHARE_PERCENT = 5.0
MEBIBYTE = 1024 * 1024
TEST = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"
SMALL_AGENT = """
import http.client, json, os, subprocess, sys, urllib.parse
place = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
messages = [{"role": "user", "content": sys.stdin.read()}]
connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
while True:
    body = json.dumps({"messages": messages, "tools": tools})
    connection.request("POST", place.path + "/chat/completions", body, key)
    message = json.loads(connection.getresponse().read())["choices"][0]["message"]
    messages.append(message)
    for call in message.get("tool_calls") or ():
        command = json.loads(call["function"]["arguments"])["command"]
        subprocess.run(["/bin/sh", "-c", command])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
    if not message.get("tool_calls"):
        break
"""


@dataclass(frozen=True, slots=True)
class Timed:
    record: RolloutRecord
    wall: float
    processor: float
    """Of this process, in which the model runs too."""


async def rollout(agent: str, rounds: int) -> list[ReportRow]:
    chosen = agent if agent != "small" else f"command:{shlex.join(['python3', '-c', SMALL_AGENT])}"
    task = Task(instruction="Write to the files.", id="files", verifier=TEST, files=make_files())
    pairs: list[tuple[Timed, Timed]] = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        commands = [f"echo {number} >> folder{number % 25}/file{number}.txt" for number in range(CALLS - 1)]
        turns = [{"tool": "bash", "arguments": {"command": command, "description": "Write"}} for command in commands]
        script.write_text(json.dumps({"turns": [*turns, {"text": "Done."}]}))
        for number in range(rounds + 1):
            # A new store each time: otherwise the contents are there from the round before.
            with Store.open(Path(folder) / f"store{number}") as store:
                timed = []
                for snapshots in (False, True) if number % 2 else (True, False):
                    config = RunConfig(
                        model=f"replay:{script}", agent=chosen, store=store, retries=0, snapshots=snapshots
                    )
                    began = time.process_time()
                    (record,) = (await run_batch([task], config)).records
                    if record.reward != 1.0 or record.call_count < CALLS:
                        raise RuntimeError(f"{record.outcome} after {record.call_count} calls: {record.error}")
                    timed.append(Timed(record, record.wall_s or 0.0, time.process_time() - began))
                plain, saved = timed if number % 2 else timed[::-1]
                if saved.record.snapshots["saved"] <= CALLS or saved.record.snapshots["problems"]:
                    raise RuntimeError(f"there are snapshots missing: {saved.record.snapshots}")
                if number:  # the first round warms caches up
                    pairs.append((plain, saved))
    ratios = [100 * (saved.wall / plain.wall - 1) for plain, saved in pairs]
    shares = [100 * saved.record.snapshots["seconds"] / saved.wall for _, saved in pairs]
    walls = [median(pair[which].wall for pair in pairs) for which in (0, 1)]
    processor = median(saved.processor - plain.processor for plain, saved in pairs)
    whole = median(plain.processor + plain.record.usage["cpu_seconds"] for plain, _ in pairs)
    cost = median(ratios)
    return [
        ReportRow(f"{agent}: wall time of {CALLS} calls without snapshots", f"{walls[0]:.2f} s"),
        ReportRow(f"{agent}: with snapshots", f"{walls[1]:.2f} s"),
        ReportRow(
            f"{agent}: median of the differences in pairs ({min(ratios):.1f} to {max(ratios):.1f} %)",
            f"{cost:.1f} %",
            f"< {SHARE_PERCENT:g} %",
            cost < SHARE_PERCENT,
        ),
        ReportRow(f"{agent}: reading the folder, share of the wall time", f"{median(shares):.1f} %"),
        ReportRow(
            f"{agent}: processor time of all snapshots, {processor * 1000:.0f} ms beside {whole:.1f} s",
            f"{100 * processor / whole:.1f} %",
        ),
    ]


def make_files() -> dict[str, bytes]:
    """Ten megabytes that hardly compress."""
    source = random.Random(0)
    return {f"folder{number % 25}/file{number}.txt": source.randbytes(FILE_BYTES) for number in range(FILES)}


def scan(rounds: int) -> list[ReportRow]:
    lines = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        for path, content in make_files().items():
            (small / path).parent.mkdir(parents=True, exist_ok=True)
            (small / path).write_bytes(content)
        for number in range(MANY_FILES):
            place = large / f"folder{number % 500}" / str(number)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(str(number))
        time.sleep(0.1)
        for name, top in ((f"{FILES} files, 10 MB", small), (f"{MANY_FILES} files", large)):
            first, scanned = timed_scan(top, FolderScan())
            again = [timed_scan(top, scanned)[0] for _ in range(rounds)]
            lines.append(ReportRow(f"scan of {name}: the first", f"{first * 1000:.1f} ms"))
            lines.append(ReportRow(f"scan of {name}: nothing changed", f"{median(again) * 1000:.1f} ms"))
    return lines


def timed_scan(folder: Path, earlier: FolderScan) -> tuple[float, FolderScan]:
    descriptor = os.open(folder, os.O_RDONLY)
    began = time.perf_counter()
    try:
        options = ScanOptions(file_bytes=8 * MEBIBYTE, total_bytes=128 * MEBIBYTE)
        result = scan_folder(descriptor, earlier, options)
        return time.perf_counter() - began, result
    finally:
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", nargs="*", default=["rollout", "scan"], choices=["rollout", "scan"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--agent", default="opencode", help="an agent, or small")
    options = parser.parse_args()
    lines: list[ReportRow] = []
    if "rollout" in options.measure:
        lines += asyncio.run(rollout(options.agent, options.rounds))
    if "scan" in options.measure:
        lines += scan(options.rounds)
    for line in lines:
        word = "" if line.reached is None else "reached" if line.reached else "NOT REACHED"
        print(f"{line.measure:<66}{line.value:>10}  {line.target:>6} {word}")


if __name__ == "__main__":
    main()
