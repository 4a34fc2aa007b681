"""How quick the page is: `python -m bench.page [--rollouts 100000] [--transcripts 10000] [--calls 2000]`.

Makes a store with so many rollouts, some of them with transcripts, one with many calls and one with a million sampled
tokens, serves the page over it, and prints how long the first views take over HTTP, how long a search in the
transcripts takes, and how long an event needs from a process that writes it to a browser that listens.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from paddock.capture.trace import Call, Event, Level
from paddock.store import Store, rows
from paddock.store.calls import save as save_call
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.store.sequences import WriteCache

if TYPE_CHECKING:
    from collections.abc import Iterator

TASKS, BATCHES, ROUNDS = 300, 50, 7
SYLLABLES = ("lor", "em", "ip", "sum", "dol", "sit", "am", "et", "con", "sec", "tet", "ur", "ad", "ip", "isc", "ing")
MANY, MILLION = "r-many-calls", "r-million-tokens"
OUTCOMES = [*[Outcome.OK] * 16, Outcome.TIMEOUT, Outcome.AGENT, Outcome.MODEL, Outcome.BUDGET]


def a_record(source: random.Random, number: int) -> RolloutRecord:
    outcome = source.choice(OUTCOMES)
    began = 1_790_000_000.0 + number * 7
    return RolloutRecord(
        f"r{number:08x}{source.getrandbits(48):012x}",
        f"task-{source.randrange(TASKS):03d}",
        agent=source.choice(("opencode", "codex", "claude-code")),
        model=source.choice(("qwen3-4b", "qwen3-8b", "glm-5-air")),
        batch_id=f"b{number * BATCHES // 100_000:04d}",
        member=number % 8,
        config={"temperature": 1.0},
        outcome=outcome,
        reward=float(source.random() < 0.4) if outcome.keeps_reward else None,
        error=None if outcome is Outcome.OK else f"the {outcome} broke in step {source.randrange(40)}",
        started_at=began,
        finished_at=began + source.lognormvariate(4, 0.7),
        stage="done",
        stages={"sandbox": 0.1, "agent": source.random() * 100, "verifier": 1.5},
        call_count=source.randrange(1, 60),
        prompt_tokens=source.randrange(200_000),
        completion_tokens=source.randrange(20_000),
        level="tokens",
    )


def a_transcript(source: random.Random, number: int) -> list[Call]:
    """Four calls with outputs of tools of some 10,000 characters. One in a hundred has a rare error."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Fix the failing test {number}."}]
    calls = []
    for index in range(4):
        words = [f"{source.choice(SYLLABLES)}{source.choice(SYLLABLES)}" for _ in range(400)]
        if source.randrange(400) == 0:
            words[200:200] = ["RareError:", "the", "needle", "was", "not", "found"]
        function = {"name": "bash", "arguments": json.dumps({"command": f"pytest tests/test_{words[0]}.py"})}
        message = {
            "role": "assistant",
            "content": f"I look at {words[1]}.",
            "tool_calls": [{"id": f"t{index}", "function": function}],
        }
        calls.append(
            Call(f"c{index}", index, request={"messages": list(messages)}, message=message, started=1.0, ended=2.0)
        )
        messages += [message, {"role": "tool", "tool_call_id": f"t{index}", "content": " ".join(words)}]
    return calls


def make(folder: Path, rollouts: int, calls: int, transcripts: int) -> None:
    """The store that is measured."""
    source = random.Random(7)
    with Store.open(folder) as store:
        with store._database.write() as connection:
            for number in range(rollouts):
                record = a_record(source, number)
                key = rows.insert(connection, record, store._owner.to_text())
                if number >= rollouts - transcripts:
                    cache = WriteCache(key)
                    for call in a_transcript(source, number):
                        save_call(connection, cache, call)
                rows.finish(connection, key, record)
        began = time.perf_counter()
        before = store.index_transcripts()
        while before is not None:
            before = store.index_transcripts(before)
        print(f"{rollouts} rollouts indexed in {time.perf_counter() - began:.1f} s", file=sys.stderr)
        long_rollout(store, MANY, calls, sampled=40, tool_tokens=10, alternatives=0)
        long_rollout(store, MILLION, 200, sampled=5000, tool_tokens=100, alternatives=3)


def long_rollout(store: Store, name: str, calls: int, *, sampled: int, tool_tokens: int, alternatives: int) -> None:
    source = random.Random(3)
    record = RolloutRecord(name, "task-long", batch_id="b-long", started_at=time.time())
    store.begin(record)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Go."}]
    ids = [source.randrange(150_000) for _ in range(500)]
    for index in range(calls):
        completion = [source.randrange(150_000) for _ in range(sampled)]
        texts = [f"t{number}" for number in completion]
        logprobs = [-source.random() for _ in completion]
        tops = [{f"t{each}": -0.5 - each for each in range(alternatives)} for _ in completion] if alternatives else []
        function = {"name": "bash", "arguments": json.dumps({"command": f"ls {index}"})}
        tool = {"id": f"call_{index}", "type": "function", "function": function}
        message = {"role": "assistant", "content": " ".join(texts[:200]), "tool_calls": [tool]}
        call = Call(
            f"c{index}", index, request={"model": "policy", "messages": list(messages)}, prompt_token_ids=list(ids),
            completion_token_ids=completion, logprobs=logprobs, tokens=texts, top_logprobs=tops, message=message,
            finish_reason="tool_calls", started=time.time(), ended=time.time(), level=Level.TOKENS, engine="vllm",
            parent=f"c{index - 1}" if index else None, shared_tokens=len(ids) - tool_tokens if index else 0,
        )  # fmt: skip
        store.save_call(name, call)
        store.add_event(name, Event(time.time(), "call", {"call": call.id}))
        messages += [message, {"role": "tool", "tool_call_id": tool["id"], "content": f"file-{index}.txt " * 10}]
        ids += completion + [source.randrange(150_000) for _ in range(tool_tokens)]
    record.outcome, record.reward, record.call_count = Outcome.OK, 1.0, calls
    store.finish(record)


class View:
    """`paddock view` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "paddock", "view", "--store", str(folder), "--no-open", "--json"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        address = json.loads(self._process.stdout.readline())["url"]
        self.url, _, token = address.partition("/web/?token=")
        self._headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "gzip"}

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)

    def open(self, path: str) -> Any:
        return urllib.request.urlopen(urllib.request.Request(f"{self.url}/web/api/{path}", headers=self._headers))

    def seconds(self, path: str) -> tuple[float, int]:
        """Time to the last byte, and how many there were."""
        began = time.perf_counter()
        with self.open(path) as answer:
            size = len(answer.read())
        return time.perf_counter() - began, size


PATHS = {
    "table, newest first": "rollouts?limit=100",
    "table, by reward": "rollouts?limit=100&sort=reward",
    "table, by tokens, page 500": "rollouts?limit=100&sort=tokens&offset=50000",
    "table, one task": "rollouts?limit=100&task=task-007",
    "table, words in an error": "rollouts?limit=100&q=broke+step+39",
    "table, two outcomes and a reward": "rollouts?limit=100&outcome=ok&outcome=timeout&min_reward=0.5",
    "facets": "facets",
    "stats of everything": "stats",
    "stats of one task": "stats?task=task-007",
    "stats of one model": "stats?model=qwen3-4b",
    "rewards over time": "learning",
    "rewards by batch, for each task": "learning?by=batch&split=task",
    "batches": "batches?limit=50",
    "causes": "causes",
    "groups": "groups?limit=50",
}
FIRST_VIEW = ("rollouts?limit=100", "facets", "stats", "learning")
SEARCHES = {
    "search of a rare word": "needle",
    "search of a phrase": "%22the+needle+was+not+found%22",
    "search of two frequent words": "look+failing",
    "search of the beginning of a word": "lor",
}


def first_views(view: View, rollout: str, last: str) -> Iterator[tuple[str, str]]:
    here = f"rollouts/{rollout}"
    yield "rollout", here
    yield "transcript, 500 items", f"{here}/transcript"
    yield "calls", f"{here}/calls"
    yield "tokens of the last prompt", f"{here}/calls/{last}/tokens?part=prompt"
    yield "tokens of the last completion", f"{here}/calls/{last}/tokens"


def live_latency(view: View, folder: Path, rounds: int = 20) -> list[float]:
    """From just before an event is written, by another process than the page's, to its arrival here."""
    with Store.open(folder) as store:
        name = f"r-live-{time.time_ns()}"
        record = RolloutRecord(name, "task-live", started_at=time.time())
        store.begin(record)
        answer = view.open(f"rollouts/{name}/live")
        arrived: dict[str, float] = {}
        came = threading.Condition()

        def read() -> None:
            for line in answer:
                if line.startswith(b"data:") and b"warning-" in line:
                    with came:
                        for item in json.loads(line[5:])["items"]:
                            arrived.setdefault(item.get("text", ""), time.perf_counter())
                        came.notify_all()

        threading.Thread(target=read, daemon=True).start()
        time.sleep(0.5)
        delays = []
        for number in range(rounds):
            began = time.perf_counter()
            text = f"warning-{number}"
            store.add_event(name, Event(time.time(), "warning", {"warning": text}))
            store.update(record)
            with came:
                if came.wait_for(partial(arrived.__contains__, text), 5):
                    delays.append(arrived[text] - began)
            time.sleep(0.1 + number * 0.003)
        record.outcome = Outcome.OK
        store.finish(record)
    return delays


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.page", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--transcripts", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--store", type=Path, help="keep the store here, and use it again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made_up:
        folder = options.store or Path(made_up)
        if not (folder / "store.db").exists():
            began = time.perf_counter()
            make(folder, options.rollouts, options.calls, options.transcripts)
            print(f"store made in {time.perf_counter() - began:.1f} s", file=sys.stderr)
        with View(folder) as view:
            print(f"{'over ' + str(options.rollouts) + ' rollouts':44} {'first':>9} {'median':>9} {'kB':>8}")
            print(f"{'first view: its four requests at once':44} {first_view(view) * 1000:6.1f} ms")
            for name, path in PATHS.items():
                report(view, name, path)
            for name, query in SEARCHES.items():
                report(view, f"{name}: table", f"rollouts?limit=100&q={query}")
                report(view, f"{name}: figures", f"stats?q={query}")
            for rollout, last in ((MANY, f"c{options.calls - 1}"), (MILLION, "c199")):
                for name, path in first_views(view, rollout, last):
                    report(view, f"{rollout}: {name}", path)
            delays = sorted(live_latency(view, folder))
            print(f"event to listener: median {median(delays) * 1000:.0f} ms, worst {delays[-1] * 1000:.0f} ms")


def first_view(view: View) -> float:
    """From the first request of the first page to the last byte of the last answer, with nothing cached."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(FIRST_VIEW)) as pool:
        list(pool.map(view.seconds, FIRST_VIEW))
    return time.perf_counter() - began


def report(view: View, name: str, path: str) -> None:
    samples = [view.seconds(path) for _ in range(ROUNDS)]
    times = [seconds for seconds, _ in samples]
    print(f"{name:44} {times[0] * 1000:6.1f} ms {median(times[1:]) * 1000:6.1f} ms {samples[0][1] / 1024:8.1f}")


if __name__ == "__main__":
    main()
