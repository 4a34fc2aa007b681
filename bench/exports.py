"""How quickly rollouts leave the store: `python -m bench.exports [FORM ...] [--rollouts N]`.

Builds a store once (kept in the folder for temporary files), then takes every rollout out of it in a process of its
own, and prints rollouts a second, tokens a second, processor time and the most memory that was held. The time and the
memory are those of the process and its threads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.capture.trace import Call, Level
from paddock.export.policy import Policy
from paddock.export.stream import export
from paddock.store import Store, calls, rows
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.store.sequences import WriteCache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paddock.sqlite import Database

FORMS = ("parquet", "trl", "skyrl", "jsonl")
CALLS = 20
FIRST, SAMPLED, GIVEN = 800, 60, 90
"""Tokens of the first prompt, of each answer, and of what a tool says after it."""
VOCABULARY = 150_000
BATCH = 100
VERSION = 1
"""Of what is built; another number builds anew."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.exports", description=__doc__)
    parser.add_argument("forms", nargs="*", default=["parquet"], help=f"of {', '.join(FORMS)}")
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.forms[0])))
        return 0
    folder = built(options.rollouts)
    for form in options.forms:
        for _ in range(options.rounds):
            print(line(form, measured_apart(folder, form)), flush=True)
    return 0


def measured_apart(folder: Path, form: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.exports", form, "--measure", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def measure(folder: Path, form: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="paddock-exports-") as out, Store.open(folder, read_only=True) as store:
        target = Path(out) / f"rollouts.{form}"
        memory = Memory()
        began, processor = time.perf_counter(), processor_seconds()
        report = export(store, form, target, policy=Policy(), progress=memory.look)
        seconds, processor = time.perf_counter() - began, processor_seconds() - processor
        return {
            "rollouts": report.rollouts,
            "tokens": report.tokens,
            "seconds": seconds,
            "processor": processor,
            "before": memory.before,
            "most": memory.most,
            "bytes": target.stat().st_size,
        }


def processor_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


class Memory:
    """What the process and those it started hold by themselves, in megabytes; pages of the store that are mapped
    belong to the system."""

    EVERY = 50

    def __init__(self) -> None:
        self.before = self.most = self.now()
        self._looks = 0

    def look(self) -> None:
        self._looks += 1
        if self._looks % self.EVERY == 0:
            self.most = max(self.most, self.now())

    def now(self) -> float:
        started = " ".join(each.read_text() for each in Path("/proc/self/task").glob("*/children")).split()
        return sum(map(held, ("self", *started)))


def held(process: str) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(each.split()[1]) / 1024 for each in lines if each.startswith("RssAnon")), 0.0)


def line(form: str, report: dict[str, Any]) -> str:
    rate, tokens = report["rollouts"] / report["seconds"], report["tokens"] / report["seconds"] / 1e6
    return (
        f"{form:8} {report['rollouts']} rollouts: {rate:6.0f} a second, {tokens:5.1f} M tokens a second,"
        f" {report['seconds']:.1f} s ({report['processor']:.1f} s of processor), memory {report['before']:.0f} → "
        f"{report['most']:.0f} MB, file {report['bytes'] / 1e6:.0f} MB"
    )


# -- the store --------------------------------------------------------------------------------------


def built(count: int) -> Path:
    """A store of `count` rollouts with `CALLS` calls each."""
    folder = Path(tempfile.gettempdir()) / f"paddock-bench-exports-{VERSION}-{count}"
    done = folder / "done"
    if done.exists():
        return folder
    began = time.perf_counter()
    source = random.Random(5)
    with Store.open(folder) as store:
        for first in range(0, count, BATCH):
            write(store._database, [rollout(source, first + each) for each in range(min(BATCH, count - first))])
        size = store.size_bytes()
    done.write_text("")
    spent = time.perf_counter() - began
    print(f"built {count} rollouts, {size / 1e6:.0f} MB, in {spent:.0f} s", file=sys.stderr)
    return folder


def write(database: Database, made: list[tuple[RolloutRecord, list[Call]]]) -> None:
    """As the store writes, but many rollouts in one transaction."""
    with database.write() as connection:
        for record, sampled in made:
            cache = WriteCache(rows.insert(connection, record, "bench"))
            for call in sampled:
                calls.save(connection, cache, call)
            rows.finish(connection, cache.key, record)


def rollout(source: random.Random, number: int) -> tuple[RolloutRecord, list[Call]]:
    record = RolloutRecord(
        rollout_id=f"r{number:08x}{source.randrange(16**8):08x}",
        task_id=f"task-{number // 8 % 500}",
        batch_id=f"batch-{number // 4000}",
        member=number % 8,
        model="policy",
        outcome=Outcome.OK,
        reward=float(source.random() < 0.5),
        started_at=1_700_000_000.0 + number,
        finished_at=1_700_000_060.0 + number,
        call_count=CALLS,
        trainable_calls=CALLS,
        level="tokens",
    )
    return record, list(conversation(source))


def conversation(source: random.Random) -> Iterator[Call]:
    prompt = tokens(source, FIRST)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Make the tests pass."}]
    for index in range(CALLS):
        sampled = tokens(source, SAMPLED)
        message = {"role": "assistant", "content": f"I look at file {source.randrange(10**9)} and change it."}
        yield Call(
            f"c{index}",
            index,
            request={"model": "policy", "messages": list(messages), "max_tokens": 4096},
            forwarded={"temperature": 1.0, "logprobs": True, "return_token_ids": True},
            prompt_token_ids=prompt,
            completion_token_ids=sampled,
            logprobs=LOGPROBS[source.randrange(1000) :][:SAMPLED],
            message=message,
            finish_reason="tool_calls",
            usage={"prompt_tokens": len(prompt), "completion_tokens": SAMPLED},
            status=200,
            started=1_700_000_000.25 + index,
            ended=1_700_000_000.75 + index,
            engine="vllm",
            model="policy",
            weight_version="12",
            level=Level.TOKENS,
        )
        messages = [*messages, message, {"role": "tool", "content": f"done {source.randrange(10**9)}"}]
        prompt = prompt + sampled + tokens(source, GIVEN)


def tokens(source: random.Random, count: int) -> list[int]:
    words = array("I", source.randbytes(4 * count))
    return [word % VOCABULARY for word in words]


LOGPROBS = [-random.Random(number).expovariate(2.0) for number in range(1000 + SAMPLED)]


if __name__ == "__main__":
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    sys.exit(main())
