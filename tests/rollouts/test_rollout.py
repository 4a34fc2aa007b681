"""One rollout: every way it can end, and that it ends once."""

import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from paddock.agents.base import Agent
from paddock.agents.command import CommandAgent
from paddock.capture.upstream import Upstream
from paddock.errors import PaddockError
from paddock.limits import MEBIBYTE, Budget, RolloutTimeouts, SandboxLimits
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.rollouts.api import reverify
from paddock.rollouts.config import RunConfig
from paddock.rollouts.context import RunContext
from paddock.rollouts.rollout import Rollout
from paddock.sandbox.local import LocalSandbox
from paddock.sandbox.network.policy import NetworkPolicy
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.tasks.settings import TaskNetwork
from paddock.tasks.task import Task
from rollouts.played import (
    IS_DONE,
    LIMITS,
    NOBODY_THERE,
    SOLVES,
    TIMEOUTS,
    UPSTREAM_KEY,
    a_task,
    needs_bwrap,
    own_children,
    rolled,
    run,
    shell,
    speaker,
    spoken,
    wait_until,
    working_in,
)

pytestmark = needs_bwrap

SOLVE = "echo 42 > answer.txt"
Act = Callable[[Rollout, "asyncio.Task[RolloutRecord]"], Awaitable[None]]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "store") as reopened:
        yield reopened


async def follow(
    store: Store,
    agent: Agent,
    act: Act | None = None,
    *,
    task: Task | None = None,
    model: Endpoint = NOBODY_THERE,
    on_change: Callable[[Rollout], None] | None = None,
    **fields: Any,
) -> Rollout:
    """A rollout that `act` meddles with while it runs. It is over when this returns."""
    async with Upstream() as upstream:
        config = RunConfig(model=model, agent=agent, **fields)
        context = RunContext.create(config, endpoint=model, store=store, upstream=upstream)
        rollout = Rollout(task or a_task(), context, on_change=on_change)
        running = asyncio.ensure_future(rollout.run())
        if act is not None:
            await act(rollout, running)
        await asyncio.wait([running])
        if not running.cancelled():
            running.result()
        return rollout


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.002)


def ended_once(store: Store, rollout_id: str) -> RolloutRecord:
    """What the store says of a rollout that is over: one outcome, nothing open."""
    record = store.get(rollout_id)
    assert record is not None
    assert record.outcome is not None
    assert record.finished_at is not None
    assert (record.reward is None) == (record.reward_reason is not None)
    assert store.open_sandboxes() == []
    outcomes = [event for _, event in store.events(rollout_id) if event.kind == "outcome"]
    assert len(outcomes) == 1
    assert outcomes[0].data["outcome"] == record.outcome
    return record


# -- rewards ------------------------------------------------------------------------------------------


def test_work_that_is_right_is_rewarded(store: Store) -> None:
    record = rolled(store, shell(SOLVE))
    assert (record.outcome, record.reward, record.error) == (Outcome.OK, 1.0, None)
    assert record.workdir_files == ["answer.txt"]
    assert set(record.stages) == {"install", "sandbox", "setup", "agent", "verifier"}
    assert ended_once(store, record.rollout_id).reward == 1.0


def test_work_that_is_wrong_is_worth_zero_and_not_unknown(store: Store) -> None:
    record = rolled(store, shell("echo 41 > answer.txt"))
    assert (record.outcome, record.reward, record.reward_reason) == (Outcome.OK, 0.0, None)


@pytest.mark.parametrize(
    ("verifier", "reason"),
    [
        ("true", "wrote no reward"),
        ("mkdir -p /logs/verifier; echo nan > /logs/verifier/reward.txt", "not finite"),
        ("mkdir -p /logs/verifier; echo 1e999 > /logs/verifier/reward.txt", "not finite"),
        ("mkdir -p /logs/verifier; echo good > /logs/verifier/reward.txt", "not one number"),
        ("mkdir -p /logs/verifier; echo 1 > /logs/verifier/x; ln -s x /logs/verifier/reward.txt", "link"),
        ("mkdir -p /logs/verifier; mkfifo /logs/verifier/reward.txt", "regular"),
        ("mkdir -p /logs/verifier; head -c 1M /dev/zero > /logs/verifier/reward.txt", "larger|bytes"),
        ("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; kill -9 $$", "signal 9"),
    ],
)
def test_a_verifier_that_says_nothing_usable_breaks_as_verifier(store: Store, verifier: str, reason: str) -> None:
    record = rolled(store, shell(SOLVE), task=a_task(verifier))
    assert (record.outcome, record.reward) == (Outcome.VERIFIER, None)
    assert re.search(reason, record.reward_reason or ""), record.reward_reason
    ended_once(store, record.rollout_id)


def test_a_verifier_that_hangs_is_ended(store: Store) -> None:
    quick = RolloutTimeouts(agent=5, verifier=0.2)
    record = rolled(store, shell(SOLVE), task=a_task("echo 1 > /logs/verifier/reward.txt; sleep 60", timeouts=quick))
    assert (record.outcome, record.reward) == (Outcome.VERIFIER, None)
    assert "0.2 s" in (record.reward_reason or "")


def test_a_reward_has_parts(store: Store) -> None:
    verifier = (
        """mkdir -p /logs/verifier; echo '{"reward": 0.5, "style": 0.25}' > /logs/verifier/reward.json; exit 3"""
    )
    record = rolled(store, shell(SOLVE), task=a_task(verifier))
    assert (record.reward, record.reward_parts, record.test_exit_code) == (0.5, {"style": 0.25}, 3)


def test_a_task_without_tests_has_no_reward(store: Store) -> None:
    record = rolled(store, shell(SOLVE), task=Task(instruction="Do as you like.", timeouts=TIMEOUTS, sandbox=LIMITS))
    assert (record.outcome, record.reward) == (Outcome.OK, None)
    assert record.reward_reason


# -- who broke ----------------------------------------------------------------------------------------


def test_a_set_up_that_fails_blames_the_task(store: Store) -> None:
    record = rolled(store, shell(SOLVE), task=a_task(setup="echo no such thing >&2; exit 9"))
    assert (record.outcome, record.reward) == (Outcome.TASK, None)
    assert "exit code 9" in (record.error or "")
    assert "no such thing" in (record.error or "")
    ended_once(store, record.rollout_id)


def test_a_set_up_that_hangs_blames_the_task(store: Store) -> None:
    record = rolled(store, shell(SOLVE), task=a_task(setup="sleep 60", timeouts=RolloutTimeouts(setup=0.2)))
    assert record.outcome is Outcome.TASK


def test_a_program_that_is_not_there_blames_the_agent(store: Store) -> None:
    record = rolled(store, CommandAgent("no-such-program"))
    assert (record.outcome, record.reward) == (Outcome.AGENT, None)
    assert "no-such-program" in (record.error or "")


def test_an_exit_code_alone_is_no_failure(store: Store) -> None:
    record = rolled(store, shell(f"{SOLVE}; exit 3"))
    assert (record.outcome, record.reward, record.exit_code) == (Outcome.OK, 1.0, 3)


def test_an_endpoint_that_is_not_there_blames_the_model(store: Store) -> None:
    quick = RolloutTimeouts(agent=20, model_call=1.0)
    record = rolled(store, speaker(), task=a_task(timeouts=quick))
    assert (record.outcome, record.reward, record.call_count) == (Outcome.MODEL, None, 1)
    ended_once(store, record.rollout_id)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_an_endpoint_that_refuses_the_key_blames_the_model(store: Store, status: int) -> None:
    script = {**SOLVES, "faults": [{"status": status, "message": f"never {status}", "times": 99}]}
    record, _ = run(spoken(store, script))
    assert (record.outcome, record.reward) == (Outcome.MODEL, None)
    assert f"never {status}" in (record.error or "")


REFUSED = {"tasks": [{"when": "Write 42", "turns": [{"text": "hi"}]}]}


def test_a_request_that_is_refused_is_the_agents_own_fault(store: Store) -> None:
    """It cannot buy another try by asking for nonsense at the end."""
    script = "converse(); post({'messages': [{'role': 'user', 'content': 'nonsense'}]}); post({'messages': []})"
    record, server = run(spoken(store, REFUSED, speaker(script)))
    assert [served.status for served in server.log][:2] == [200, 400]
    assert (record.outcome, record.reward) == (Outcome.OK, 0.0)


def test_an_endpoint_that_refuses_everything_blames_the_model(store: Store) -> None:
    record, _ = run(spoken(store, REFUSED, speaker("post({'messages': [{'role': 'user', 'content': 'x'}]})")))
    assert (record.outcome, record.reward) == (Outcome.MODEL, None)


def test_a_dead_sandbox_blames_the_sandbox(store: Store) -> None:
    async def kill(rollout: Rollout, running: Any) -> None:
        await until(lambda: getattr(rollout._scene, "_program", None) is not None)
        (entry,) = store.open_sandboxes()
        assert entry.host_pid is not None
        os.kill(entry.host_pid, 9)

    rollout = run(follow(store, shell(f"{SOLVE}; sleep 60"), kill))
    assert (rollout.record.outcome, rollout.record.reward) == (Outcome.SANDBOX, None)
    ended_once(store, rollout.id)


def test_a_sandbox_that_does_not_isolate_needs_consent(store: Store) -> None:
    with pytest.raises(PaddockError, match="isolate"):
        rolled(store, shell(SOLVE), sandbox="process")
    assert store.count() == 0
    record = rolled(store, shell(SOLVE), sandbox="process", consent=True)
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0)
    assert not Path("/logs").exists()


def test_a_sandbox_that_does_not_exist_is_refused_at_once(store: Store) -> None:
    with pytest.raises(PaddockError) as caught:
        rolled(store, shell(SOLVE), sandbox="dokcer")
    assert "bwrap" in (caught.value.hint or "")
    assert store.count() == 0


def test_what_would_help_is_kept_with_the_reason(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e2b", None)
    record = rolled(store, shell(SOLVE), sandbox="e2b")
    assert record.outcome is Outcome.SANDBOX
    assert record.error == "the e2b backend needs E2B's SDK (pip install 'paddock-rl[e2b]')"


def test_a_sandbox_that_cannot_be_made_blames_the_sandbox(store: Store) -> None:
    """Nobody can make one in a millisecond."""
    record = rolled(store, shell(SOLVE), task=a_task(timeouts=RolloutTimeouts(sandbox=0.001)))
    assert (record.outcome, record.reward) == (Outcome.SANDBOX, None)
    assert own_children() == []


@pytest.mark.parametrize(("work", "reward"), [(SOLVE, 1.0), ("true", 0.0)])
def test_what_was_done_before_the_time_was_up_counts(store: Store, work: str, reward: float) -> None:
    record = rolled(store, shell(f"{work}; sleep 60"), agent_timeout=0.6)
    assert (record.outcome, record.reward) == (Outcome.TIMEOUT, reward)
    assert record.stages["agent"] < 5
    ended_once(store, record.rollout_id)


def test_calls_beyond_the_budget_end_the_work_and_it_still_counts(store: Store) -> None:
    calls = [{"tool": "bash", "arguments": {"command": f"{SOLVE}; echo {n}"}} for n in range(9)]
    record, server = run(spoken(store, {"turns": [*calls, {"text": "Done."}]}, budget=Budget(calls=3)))
    assert (record.outcome, record.reward, record.call_count) == (Outcome.BUDGET, 1.0, 3)
    assert len(server.log) == 3
    assert "calls" in (record.error or "")


def test_tokens_beyond_the_budget_end_the_work(store: Store) -> None:
    calls = [{"tool": "bash", "arguments": {"command": f"echo {n}"}} for n in range(9)]
    record, _ = run(spoken(store, {"turns": calls}, budget=Budget(completion_tokens=20)))
    assert (record.outcome, record.reward) == (Outcome.BUDGET, 0.0)
    assert record.completion_tokens <= 20


def test_parallel_calls_cannot_overdraw_the_tokens(store: Store) -> None:
    """Thirty at once, and tokens for less than two."""
    script = """
import threading
def ask(n): post({"messages": [{"role": "user", "content": "x%d" % n}], "tools": TOOLS, "stream": True})
threads = [threading.Thread(target=ask, args=(n,)) for n in range(30)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    words = {"turns": [{"text": "word " * 30}], "faults": [{"per_token_delay": 0.002}]}
    record, _ = run(spoken(store, words, speaker(script), budget=Budget(completion_tokens=50)))
    assert record.completion_tokens <= 50
    assert record.outcome is Outcome.BUDGET


def test_more_memory_than_allowed_is_a_budget(store: Store) -> None:
    limits = SandboxLimits(memory_bytes=60 * MEBIBYTE, disk_bytes=16 * MEBIBYTE)
    eat = "import time\nheld = []\nwhile True:\n    held.append(bytearray(4 << 20)); time.sleep(0.005)"
    record = rolled(store, shell(f"{SOLVE}; python3 -c '{eat}'; sleep 60"), task=a_task(sandbox=limits))
    assert (record.outcome, record.reward) == (Outcome.BUDGET, 1.0)
    assert record.usage["killed_for"] == "memory"


def test_a_store_that_cannot_begin_raises(tmp_path: Path) -> None:
    reopened = Store.open(tmp_path / "store")
    reopened.close()
    with pytest.raises(PaddockError):
        rolled(reopened, shell(SOLVE))


# -- stopping -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["install", "sandbox", "setup", "agent", "verifier"])
def test_an_abort_in_any_stage_is_recorded(store: Store, stage: str) -> None:
    reached = asyncio.Event()

    def watch(rollout: Rollout) -> None:
        if rollout.record.stage == stage:
            reached.set()

    async def stop(rollout: Rollout, running: Any) -> None:
        await reached.wait()
        await rollout.abort("had enough")

    slow = a_task("sleep 60", setup="sleep 60" if stage == "setup" else "")
    agent = shell("sleep 60" if stage == "agent" else SOLVE)
    rollout = run(follow(store, agent, stop, task=slow, on_change=watch), 15)
    record = ended_once(store, rollout.id)
    assert (record.outcome, record.error, record.reward) == (Outcome.CANCELLED, "had enough", None)
    assert own_children() == []


def test_an_abort_wins_over_an_agent_that_ends_because_of_it(store: Store) -> None:
    """The caller's task must not be cancelled for a rollout that is over."""

    async def act() -> tuple[RolloutRecord, bool]:
        script = {"turns": [{"text": "word " * 500}], "faults": [{"per_token_delay": 0.02}]}
        async with ReplayServer(script) as server, Upstream() as upstream:
            endpoint = Endpoint(server.url, "replay", engine="vllm")
            config = RunConfig(model=endpoint, agent=speaker())
            context = RunContext.create(config, endpoint=endpoint, store=store, upstream=upstream)
            rollout = Rollout(a_task(), context)

            async def caller() -> bool:
                await rollout.run()
                await asyncio.sleep(0.6)
                return True

            running = asyncio.ensure_future(caller())
            await until(lambda: bool(server.log) and bool(server.log[0].sampled_ids))
            await rollout.abort()
            await asyncio.wait([running])
            return rollout.record, not running.cancelled()

    record, lived_on = run(act())
    assert (record.outcome, lived_on) == (Outcome.CANCELLED, True)
    (call,) = store.calls(record.rollout_id)
    assert (call.aborted, call.trainable) == (True, False)


def test_a_cancel_at_any_moment_leaves_one_outcome_and_nothing_running(store: Store) -> None:
    """Cancelled after so many events, and after so many turns of the loop before the first."""

    async def cancelled_after(events: int, turns: int) -> Rollout:
        seen = 0
        due = asyncio.Event()

        def count(_: Rollout) -> None:
            nonlocal seen
            seen += 1
            if seen >= events:
                due.set()

        async def stop(rollout: Rollout, running: Any) -> None:
            if events:
                await due.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            running.cancel()

        async with ReplayServer(SOLVES) as server:
            endpoint = Endpoint(server.url, "replay", engine="vllm")
            return await follow(store, speaker(), stop, model=endpoint, on_change=count)

    moments = [*((0, turns) for turns in range(1, 8)), *((events, events % 3) for events in range(1, 8))]
    for events, turns in moments:
        rollout = run(cancelled_after(events, turns))
        wait_until(lambda: store.count(finished=False) == 0)
        record = store.get(rollout.id)
        if record is not None:
            assert ended_once(store, rollout.id).outcome is Outcome.CANCELLED, (events, turns)
        assert own_children() == [], (events, turns)


def test_a_cancel_while_the_sandbox_is_made_leaves_no_process(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has only just been started has no name yet, and its own child waits for it."""
    monkeypatch.chdir(tmp_path)

    async def cancelled_after(seconds: float) -> None:
        async def stop(rollout: Rollout, running: Any) -> None:
            await until(lambda: rollout.record.stage == "sandbox")
            await asyncio.sleep(seconds)
            running.cancel()

        await follow(store, shell("sleep 60"), stop)

    for moment in range(24):
        run(cancelled_after(moment * 0.0015))
    assert own_children() == []
    wait_until(lambda: working_in(tmp_path) == [], 2)


def test_a_cancel_while_the_model_port_is_opened_leaves_no_listener(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    listeners = []
    find, expose = LocalSandbox.socket_owner_finder, LocalSandbox.expose

    async def recorded_expose(sandbox: LocalSandbox, port: int) -> Any:
        listeners.append(await expose(sandbox, port))
        return listeners[-1]

    async def cancelled_finder(sandbox: LocalSandbox) -> Any:
        await find(sandbox)
        raise asyncio.CancelledError

    async def wait(rollout: Rollout, running: Any) -> None:
        await asyncio.wait([running])

    monkeypatch.setattr(LocalSandbox, "expose", recorded_expose)
    monkeypatch.setattr(LocalSandbox, "socket_owner_finder", cancelled_finder)
    rollout = run(follow(store, shell("true"), wait))
    assert ended_once(store, rollout.id).outcome is Outcome.CANCELLED
    assert all(listener.fileno() == -1 for listener, _ in listeners)


# -- the store fails ----------------------------------------------------------------------------------


def limit_pages(store: Store, more: int | None) -> None:
    """Let the database grow by so many pages and no further, as on a full disk. None: as much as it likes."""
    with store._database.autocommit() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {2**31 if more is None else pages + more}")


def test_calls_that_cannot_be_kept_make_the_rollout_useless_but_it_has_its_outcome(store: Store) -> None:
    """The disk is full from the first call on; the reserve cannot help a database that may not grow."""
    long = {
        "turns": [{"tool": "bash", "arguments": {"command": f"echo {os.urandom(99999).hex()}"}}, {"text": "Done."}]
    }

    def fill(rollout: Rollout) -> None:
        if rollout.record.stage == "agent":
            limit_pages(store, 2)

    try:
        record, _ = run(spoken(store, long, on_change=fill))
    finally:
        limit_pages(store, None)
    assert (record.outcome, record.reward) == (Outcome.ENVIRONMENT, None)
    assert "no space" in (record.error or "")
    assert store.count(finished=False) == 0
    assert store.open_sandboxes() == []
    assert own_children() == []


def test_a_work_folder_that_cannot_be_kept_loses_no_outcome(store: Store) -> None:
    def fill(rollout: Rollout) -> None:
        if rollout.record.stage == "agent":
            limit_pages(store, 8)

    try:
        record = rolled(store, shell(f"{SOLVE}; head -c 3M /dev/urandom > big"), on_change=fill)
    finally:
        limit_pages(store, None)
    assert record.outcome is not None
    assert store.count(finished=False) == 0
    assert ended_once(store, record.rollout_id).outcome == record.outcome


# -- what goes in and comes out -----------------------------------------------------------------------


def test_the_instruction_reaches_the_agent_as_it_is(store: Store) -> None:
    instruction = 'Say "ü" & $HOME `x`\n\n  keep  spaces\t.'
    agent = shell('cat > stdin; cat "$PADDOCK_INSTRUCTION_FILE" > file; pwd > where')
    record = rolled(store, agent, task=a_task("cat stdin; printf '|'; cat file where", instruction=instruction))
    assert record.verifier_stdout == f"{instruction}|{instruction}/home/user/workdir\n"


def test_files_are_staged_with_their_modes_and_the_set_up_sees_them(store: Store) -> None:
    task = a_task(
        "cat made; stat -c '%a %U' run.sh data/x",
        files={"run.sh": b"echo ran", "data/x": b"\x00\xff"},
        modes={"run.sh": 0o755},
        setup="./run.sh > made",
    )
    record = rolled(store, shell("test -x run.sh && cat made data/x > /dev/null"), task=task)
    assert record.verifier_stdout == "ran\n755 user\n644 user\n"
    assert record.exit_code == 0


def test_the_agent_sees_neither_tests_nor_solution(store: Store) -> None:
    task = a_task(IS_DONE, solution={"solve.sh": b"echo SOLUTION_MARK"}, files={"given": b"x"})
    look = "grep -rIls -e SOLUTION_MARK -e 'cat answer.txt' / --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr"
    record = rolled(store, shell(f"({look}; ls /tests /home/user/tests) > seen 2>/dev/null; cat seen"), task=task)
    assert record.agent_log.strip() == ""


def test_the_sealed_folder_can_be_scored_again_and_the_first_score_is_kept(store: Store) -> None:
    record = rolled(store, shell("echo 41 > answer.txt"))
    assert record.reward == 0.0
    other = {"test.sh": IS_DONE.replace("42", "41").encode()}
    verdict = run(reverify(record.rollout_id, other, store=store))
    assert verdict.reward.value == 1.0
    assert [score["reward"] for score in store.scores(record.rollout_id)] == [1.0]
    assert ended_once(store, record.rollout_id).reward == 0.0
    assert store.open_sandboxes() == []


@needs_bwrap
def test_tests_that_score_again_have_the_network_of_the_task(store: Store) -> None:
    record = rolled(store, shell("echo 42 > answer.txt"))
    tests = {"test.sh": b'echo "${http_proxy:+0.5}" > /logs/verifier/reward.txt\n'}
    task = replace(a_task(), network=TaskNetwork(verifier=NetworkPolicy("public")))
    verdict = run(reverify(record.rollout_id, tests, task=task, store=store))
    assert verdict.reward.value == 0.5


def test_everything_of_a_rollout_is_in_the_store(store: Store) -> None:
    record, server = run(spoken(store, SOLVES, driver=None))
    stored = store.get(record.rollout_id)
    assert stored is not None
    assert stored.reward == 1.0
    calls = store.calls(record.rollout_id)
    assert [call.prompt_token_ids for call in calls] == [served.prompt_ids for served in server.log]
    assert [call.completion_token_ids for call in calls] == [served.sampled_ids for served in server.log]
    assert [call.logprobs for call in calls] == [served.logprobs for served in server.log]
    kinds = [event.kind for _, event in store.events(record.rollout_id)]
    assert kinds.count("stage") == 5
    assert kinds.count("call") == 2
    assert kinds[-1] == "outcome"


# -- secrets ------------------------------------------------------------------------------------------


def test_no_key_is_in_the_store_in_any_form(tmp_path: Path) -> None:
    """The agent prints its own key everywhere; the key of the endpoint is nowhere to begin with."""
    tell = (
        "import subprocess\n"
        "print(os.environ['OPENAI_API_KEY']); sys.stderr.write(os.environ['OPENAI_API_KEY'])\n"
        "post({'messages': [{'role': 'user', 'content': 'my key is ' + os.environ['OPENAI_API_KEY']}]})\n"
        "sys.exit(converse())"
    )
    script = {"turns": [{"tool": "bash", "arguments": {"command": "echo $OPENAI_API_KEY"}}, {"text": "Done."}]}
    seen: list[str] = []

    def watch(rollout: Rollout) -> None:
        if rollout._capture is not None:
            seen[:] = [rollout._capture.secret]

    with Store.open(tmp_path / "store") as store:
        record, _ = run(spoken(store, script, speaker(tell), on_change=watch, api_key=None))
        assert record.call_count == 3
        (own,) = seen
        calls, events = store.calls(record.rollout_id), store.events(record.rollout_id)
        assert repr(record.calls) == repr(calls)
        stored = store.get(record.rollout_id)
        assert stored is not None
        whole = repr((asdict(stored), [asdict(call) for call in calls], events))
        assert "***" in whole
        for secret in (own, UPSTREAM_KEY):
            assert secret not in whole
    raw = b"".join(path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert own.encode() not in raw
    assert UPSTREAM_KEY.encode() not in raw


def test_the_endpoints_key_is_not_in_the_sandbox(store: Store) -> None:
    look = (
        "env > seen; cat /proc/*/environ /proc/*/cmdline >> seen 2>/dev/null;"
        " grep -rs sk-upstream /home /tmp /etc /opt /run /var >> seen; env"
    )
    os.environ["PADDOCK_MODEL_API_KEY"] = UPSTREAM_KEY
    try:
        record, _ = run(spoken(store, SOLVES, shell(look)))
    finally:
        del os.environ["PADDOCK_MODEL_API_KEY"]
    assert "OPENAI_API_KEY=***" in record.agent_log
    assert UPSTREAM_KEY not in record.agent_log
    assert record.workdir_blob is not None
    # What it found by looking for the key is how it looked.
    assert UPSTREAM_KEY.encode() not in store.get_blob(record.workdir_blob)


def test_the_rollouts_key_is_masked_where_an_agent_puts_it(store: Store) -> None:
    leak = 'echo "$OPENAI_API_KEY" > "$OPENAI_API_KEY"; ls'
    test = "cat paddock-*; mkdir -p /logs/verifier; cp paddock-* /logs/verifier/reward.txt"
    record = rolled(store, shell(leak), task=a_task(test))
    saved = store.get(record.rollout_id)
    assert saved is not None
    stored = repr(asdict(saved)) + repr(store.events(record.rollout_id))
    assert "***" in record.verifier_stdout
    assert not re.search(r"paddock-[\w-]{20}", stored.replace("paddock-sb", ""))


def test_strange_bodies_are_refused_and_nothing_else_happens(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    script = """
import http.client
def send(body):
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=10)
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection.request("POST", "/v1/chat/completions", body, head)
    print(connection.getresponse().status)
def user(text, **more): return json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()
for body in (b"", b"[]", b"{", b"null", b'{"messages": ' + b"[" * 9999, b'{"messages": 5}', b'{"messages": [5]}',
             user("x").replace(b'"x"', b"[" * 900 + b"1" + b"]" * 900), user("x").replace(b"x", b"\\xff\\xfe"),
             user("x").replace(b"x", b"\\\\ud800")):
    send(body)
for odd in ({"max_tokens": -5}, {"max_tokens": 1e30}, {"temperature": "hot"}, {"stream": 1}, {"tools": 5}, {"n": 5}):
    send(user("x", **odd))
send(user("good"))
"""
    record, _ = run(spoken(store, {"turns": [{"text": "hi"}]}, speaker(script)))
    codes = record.agent_log.split()
    assert len(codes) == 17, record.agent_log
    assert (set(codes[:9]), codes[9]) == ({"400"}, "200"), "half of a surrogate pair is read"
    assert set(codes) <= {"200", "400", "422"}
    assert codes[-1] == "200"
    assert record.outcome is Outcome.OK
    assert "Traceback" not in caplog.text
