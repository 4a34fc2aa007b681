"""What the rollout store costs: `python -m bench.rollout_store [--rollouts N]`.

Prints the stored size of a trace against its longest prompt, the time to save and read calls, and
the time to list and count among many rollouts.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import orjson

from paddock.capture.prefix_tree import PrefixTree
from paddock.capture.trace import Call, Level
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORDS = [
    f"{stem}{ending}"
    for stem in (
        "read",
        "file",
        "line",
        "test",
        "value",
        "error",
        "module",
        "path",
        "return",
        "def",
        "assert",
        "list",
    )
    for ending in ("", "s", "_", "()", ":", "=", ".py", "ing")
]
VOCABULARY = 150_000


class Tokenizer:
    """A toy: a word is a token, and a token always has the same id."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._random = random.Random(7)

    def __call__(self, text: str) -> list[int]:
        ids = self._ids
        return [ids.setdefault(word, self._random.randrange(VOCABULARY)) for word in text.split(" ")]


def prose(source: random.Random, size: int) -> str:
    """Text of about `size` bytes, as varied as code: some words are seen once only."""
    words: list[str] = []
    length = 0
    while length < size:
        word = source.choice(WORDS) if source.random() < 0.8 else f"{source.randrange(16**8):x}"
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:size]


def tools(source: random.Random) -> list[dict[str, Any]]:
    """About 12 kB, as a coding agent sends them with every call."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": prose(source, 1700),
                "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
            },
        }
        for name in ("bash", "edit", "glob", "grep", "read", "write")
    ]


def growing_calls(
    count: int,
    *,
    seed: int = 1,
    answer_bytes: int = 250,
    output_bytes: int = 3000,
    branch: int | None = None,
    branch_seed: int = 0,
) -> Iterator[Call]:
    """A coding agent at work: each prompt is the one before, what the model said, and a tool's output. From call
    `branch` on, it does something else, which depends on `branch_seed`."""
    source = random.Random(seed)
    shared = random.Random(0)
    tokenize = Tokenizer()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": prose(shared, 10_000)},
        {"role": "user", "content": prose(source, 600)},
    ]
    offered = tools(shared)
    prompt = tokenize(" ".join(str(message["content"]) for message in messages) + str(offered))
    prefixes = PrefixTree()
    for index in range(count):
        if index == branch:
            source = random.Random(branch_seed)
        content = prose(source, answer_bytes)
        sampled = tokenize(content)
        arguments = orjson.dumps({"command": prose(source, 120)}).decode()
        name = {"id": f"call_{index}", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        sampled += tokenize(arguments)
        answer = {"role": "assistant", "content": content, "tool_calls": [name]}
        call = Call(
            id=f"c{index}",
            index=index,
            request={
                "model": "policy",
                "messages": list(messages),
                "tools": offered,
                "tool_choice": "auto",
                "max_tokens": 4096,
                "stream": True,
            },
            forwarded={"logprobs": True, "return_token_ids": True},
            prompt_token_ids=list(prompt),
            completion_token_ids=sampled,
            logprobs=[-source.expovariate(2.0) for _ in sampled],
            message=answer,
            finish_reason="tool_calls",
            usage={"prompt_tokens": len(prompt), "completion_tokens": len(sampled)},
            status=200,
            started=1_700_000_000.25 + index,
            ended=1_700_000_000.75 + index,
            model="policy",
            level=Level.TOKENS,
        )
        continuation = prefixes.add(call)
        call.parent = None if continuation.parent is None else continuation.parent.id
        call.shared_tokens = continuation.parent_tokens
        yield call
        output = {"role": "tool", "tool_call_id": f"call_{index}", "content": prose(source, output_bytes)}
        messages += [answer, output]
        prompt = prompt + sampled + tokenize(str(output["content"]))


def prompt_bytes(call: Call) -> int:
    """The size of a prompt: its request and its token ids, both as JSON."""
    return len(orjson.dumps(call.request)) + len(orjson.dumps(call.prompt_token_ids))


def measure_trace(folder: Path, count: int) -> None:
    with Store.open(folder) as store:
        store.begin(RolloutRecord("first", "task"))
        store.prune()
        empty = store.size_bytes()
        calls = list(growing_calls(count))
        times = [_seconds(lambda call=call: store.save_call("first", call)) for call in calls]  # type: ignore[misc]
        reading = _seconds(lambda: store.calls("first"))
        store.prune()
        stored = store.size_bytes()
        assert store.calls("first") == calls
        longest = max(map(prompt_bytes, calls))
        whole = sum(map(prompt_bytes, calls))
        print(f"{count} calls, longest prompt {longest / 1000:.0f} kB, all prompts {whole / 1000:.0f} kB")
        print(f"  stored           {stored / longest:8.2f} x the longest prompt (whole file, {stored / 1000:.0f} kB)")
        print(f"                   {(stored - empty) / longest:8.2f} x without the empty store")
        store.begin(RolloutRecord("second", "task"))
        for call in growing_calls(count, seed=2):
            store.save_call("second", call)
        store.prune()
        second = (store.size_bytes() - stored) / longest
        print(f"  a second trace   {second:8.2f} x (system prompt and tools are shared)")
        last = len(orjson.dumps(calls[-1].request)) / 1000
        print(f"  save_call        {median(times) * 1000:8.2f} ms median, {max(times) * 1000:.2f} ms worst")
        print(f"  save_call, last  {median(times[-5:]) * 1000:8.2f} ms with a request of {last:.0f} kB")
        print(f"  calls()          {reading * 1000:8.2f} ms for all of them")


def measure_many(folder: Path, count: int) -> None:
    outcomes = list(Outcome)
    source = random.Random(3)
    with Store.open(folder) as store:
        began = time.perf_counter()
        for number in range(count):
            record = RolloutRecord(
                rollout_id=f"r{source.randrange(16**12):012x}{number}",
                task_id=f"task-{number % 500}",
                instruction="Make the tests pass.",
                agent="opencode" if number % 10 else "codex",
                model=f"policy-{number % 3}",
                batch_id=f"batch-{number // 64}",
                config={"temperature": 1.0, "sandbox": "bwrap"},
                started_at=1_700_000_000.0 + number,
            )
            store.begin(record)
            record.outcome = Outcome.OK if number % 4 else outcomes[number % len(outcomes)]
            record.agent_log = "done\n"
            record.finished_at = record.started_at + 60
            store.finish(record)
        each = (time.perf_counter() - began) / count
        print(f"{count} rollouts, {store.size_bytes() / 1e6:.0f} MB, begin and finish {each * 1000:.2f} ms each")
        questions: dict[str, dict[str, Any]] = {
            "all": {},
            "task_id": {"task_id": "task-7"},
            "agent": {"agent": "codex"},
            "agent, model": {"agent": "opencode", "model": "policy-1"},
            "outcome": {"outcome": Outcome.SANDBOX},
            "batch_id": {"batch_id": "batch-9"},
            "running": {"finished": False},
            "since": {"since": 1_700_000_000.0 + count * 0.9},
        }
        for name, filters in questions.items():
            listing = _best(lambda filters=filters: list(store.list(**filters, limit=100)))  # type: ignore[misc]
            counting = _best(lambda filters=filters: store.count(**filters))  # type: ignore[misc]
            print(f"  {name:14} list {listing * 1000:7.2f} ms   count {counting * 1000:7.2f} ms")
        deep = _best(lambda: list(store.list(limit=100, offset=count - 100)))
        print(f"  {'last page':14} list {deep * 1000:7.2f} ms")


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _best(work: Callable[[], object]) -> float:
    return min(_seconds(work) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--rollouts", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure_trace(Path(folder) / "trace", options.calls)
        measure_many(Path(folder) / "many", options.rollouts)


if __name__ == "__main__":
    main()
