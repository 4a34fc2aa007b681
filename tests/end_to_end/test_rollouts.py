"""`paddock rollout` from end to end: real OpenCode in bubblewrap, a scripted model, every token, a reward."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paddock.models.replay import ReplayServer, ServedRequest
from paddock.store import Store
from paddock.tasks import shipped
from rollouts.played import UPSTREAM_KEY, needs_bwrap, own_children

from .processes import quiet_environment

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(150, func_only=True), needs_bwrap]

TASKS = ("fix-test", "shell-work", "data-work")
SCRIPT = Path(shipped.__file__).parent / "replay.json"


@dataclass
class Ran:
    code: int
    lines: list[dict[str, Any]]
    words: str


async def paddock(store: Path, *words: str, **variables: str) -> Ran:
    """A `paddock` command of its own process, as a user types it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "paddock", *words, "--store", str(store), "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**quiet_environment(), **variables},
        limit=1 << 26,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ran(process.returncode, [json.loads(line) for line in out.splitlines()], err.decode())


@dataclass
class Shipped:
    """Some shipped tasks, run once, and what the model served."""

    store: Path
    ran: Ran
    log: list[ServedRequest]


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shipped]:
    folder = tmp_path_factory.mktemp("rollouts")

    async def run() -> Shipped:
        async with asyncio.timeout(120), ReplayServer(SCRIPT, api_key=UPSTREAM_KEY) as server:
            key = {"PADDOCK_MODEL_API_KEY": UPSTREAM_KEY}
            words = ("rollout", *TASKS, "--model", server.url, "--parallel", "3", "--retries", "0")
            ran = await paddock(folder / "store", *words, **key)
            return Shipped(folder / "store", ran, list(server.log))

    yield asyncio.run(run())
    assert own_children() == []


def records(solved: Shipped) -> dict[str, dict[str, Any]]:
    return {line["task_id"]: line for line in solved.ran.lines}


@pytest.mark.parametrize("task", TASKS)
def test_a_shipped_task_is_solved_and_captured_whole(solved: Shipped, task: str) -> None:
    record = records(solved)[task]
    assert (record["outcome"], record["reward"], record["error"]) == ("ok", 1.0, None), solved.ran.words
    assert record["trainable"]
    assert record["trainable_calls"] == record["calls"] >= 3
    assert record["level"] == "tokens"
    assert solved.ran.code == 0


def test_the_store_has_what_the_model_served_token_by_token(solved: Shipped) -> None:
    with Store.open(solved.store, read_only=True) as store:
        calls = [call for line in solved.ran.lines for call in store.calls(line["rollout_id"])]
    remaining = sorted(
        (tuple(call.prompt_token_ids), tuple(call.completion_token_ids), tuple(call.logprobs)) for call in calls
    )
    served = sorted((tuple(each.prompt_ids), tuple(each.sampled_ids), tuple(each.logprobs)) for each in solved.log)
    assert remaining == served
    assert all(each.status == 200 and not each.aborted for each in solved.log)


def test_calls_of_a_rollout_continue_each_other(solved: Shipped) -> None:
    with Store.open(solved.store, read_only=True) as store:
        for line in solved.ran.lines:
            calls = store.calls(line["rollout_id"])
            assert [call.role for call in calls] == ["agent"] * len(calls)
            assert [call.parent for call in calls] == [None, *(call.id for call in calls[:-1])]
            assert all(after.shared_tokens >= len(before.prompt_token_ids) for before, after in pairwise(calls))


def test_no_key_is_in_the_store_or_in_what_is_printed(solved: Shipped) -> None:
    raw = b"".join(path.read_bytes() for path in solved.store.rglob("*") if path.is_file())
    assert UPSTREAM_KEY.encode() not in raw
    with Store.open(solved.store, read_only=True) as store:
        for line in solved.ran.lines:
            record = store.get(line["rollout_id"])
            assert record is not None
            whole = repr((record, store.calls(record.rollout_id), store.events(record.rollout_id, limit=99_999)))
            assert record.workdir_blob is not None
            assert UPSTREAM_KEY not in whole
            assert "paddock-" not in whole.replace("paddock-sb", "").replace("/paddock-", "/")
            assert UPSTREAM_KEY.encode() not in store.get_blob(record.workdir_blob)
    assert UPSTREAM_KEY not in solved.ran.words
    assert UPSTREAM_KEY not in json.dumps(solved.ran.lines)


def test_a_trace_is_listed_shown_and_exported(solved: Shipped) -> None:
    record = records(solved)["fix-test"]
    name = record["rollout_id"]

    async def ask() -> list[Ran]:
        wanted = (
            ("trace", "list", "--task", "fix-test"),
            ("trace", "show", name[:14] if name[:14].startswith("r") else name),
            ("trace", "export", name, "--to", "jsonl"),
            ("trace", "export", name, "--to", "openenv"),
        )
        return list(await asyncio.gather(*(paddock(solved.store, *words) for words in wanted)))

    listed, visible, lines, openenv = asyncio.run(ask())
    assert [line["rollout_id"] for line in listed.lines] == [name]
    (whole,) = visible.lines
    assert whole["rollout_id"] == name
    assert len(whole["calls"]) == whole["call_count"] == record["calls"]
    assert [event["kind"] for event in whole["events"]].count("outcome") == 1
    assert len(lines.lines) == record["trainable_calls"]
    for line in lines.lines:
        assert len(line["completion_token_ids"]) == len(line["logprobs"])
        assert len(line["loss_mask"]) == len(line["prompt_token_ids"]) + len(line["completion_token_ids"])
    (trace,) = openenv.lines
    assert (trace["schema_version"], len(trace["turns"])) == (1, record["trainable_calls"])


def test_a_recording_plays_again_with_the_same_tokens(solved: Shipped, tmp_path: Path) -> None:
    """What was captured is a model of its own: the same agent comes to the same end with it, by the serve driver."""
    name = records(solved)["fix-test"]["rollout_id"]

    async def play() -> tuple[Ran, Path]:
        recording = tmp_path / "recording.jsonl"
        exported = await paddock(solved.store, "trace", "export", name, "--to", "replay")
        recording.write_text("".join(json.dumps(line) + "\n" for line in exported.lines))
        words = ("rollout", "fix-test", "--model", f"replay:{recording}", "--retries", "0", "--driver", "serve")
        return await paddock(tmp_path / "store", *words), tmp_path / "store"

    ran, again = asyncio.run(play())
    (record,) = ran.lines
    assert (record["outcome"], record["reward"], record["driver"]) == ("ok", 1.0, "serve"), ran.words
    with Store.open(solved.store, read_only=True) as first, Store.open(again, read_only=True) as second:
        before, after = first.calls(name), second.calls(record["rollout_id"])
        transcript = second.get(record["rollout_id"])
    assert [call.completion_token_ids for call in before] == [call.completion_token_ids for call in after]
    assert [call.logprobs for call in before] == [call.logprobs for call in after]
    assert transcript is not None
    assert transcript.transcript
    assert transcript.agent_session


def test_a_finished_rollout_is_scored_again_without_the_agent(solved: Shipped, tmp_path: Path) -> None:
    name = records(solved)["fix-test"]["rollout_id"]
    half = tmp_path / "test.sh"
    half.write_text("echo 0.5 > /logs/verifier/reward.txt")

    async def ask() -> tuple[Ran, Ran, Ran]:
        same = await paddock(solved.store, "rollout", "reverify", name, "--task", "fix-test")
        other = await paddock(solved.store, "rollout", "reverify", name, "--tests", str(half))
        return same, other, await paddock(solved.store, "trace", "show", name)

    same, other, visible = asyncio.run(ask())
    assert (same.lines[0]["reward"], other.lines[0]["reward"]) == (1.0, 0.5)
    assert visible.lines[0]["reward"] == 1.0
    assert [score["reward"] for score in visible.lines[0]["scores"]] == [1.0, 0.5]


def test_a_broken_rollout_ends_with_one_and_a_wrong_command_says_what_to_do(tmp_path: Path) -> None:
    async def ask() -> list[Ran]:
        model = ("--model", f"replay:{SCRIPT}")
        wanted = (
            ("rollout", "fix-test", *model, "--agent", "command:no-such-program", "--retries", "0"),
            ("rollout", "no-such-task", *model),
            ("rollout", "fix-test", "--model", "nonsense"),
            ("rollout", "fix-test", *model, "--agent", "opencoed"),
            ("rollout", "fix-test", *model, "--sandbox", "moon"),
            ("trace", "show", "r0000nothing"),
        )
        return list(await asyncio.gather(*(paddock(tmp_path / f"s{n}", *words) for n, words in enumerate(wanted))))

    broken, *wrong = asyncio.run(ask())
    assert (broken.code, broken.lines[0]["outcome"], broken.lines[0]["reward"]) == (1, "agent", None)
    for ran in wrong:
        assert ran.code not in (0, 130), ran.words
        assert "error:" in ran.words
        assert "hint:" in ran.words
        assert "Traceback" not in ran.words
        assert ran.lines == []
