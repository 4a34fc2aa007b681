"""Several threads and processes at once, and processes that are killed."""

import os
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from paddock.capture.trace import Call, Event
from paddock.processes import process_start_time
from paddock.store import Owner, SandboxEntry, Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord

from .children import go, running


def test_two_processes_finish_a_rollout_once(store: Store) -> None:
    for number in range(50):
        store.begin(RolloutRecord(f"r-{number}", "task"))
    code = """
store = Store.open(folder); ready()
for number in range(50):
    record = RolloutRecord(f"r-{number}", "task", outcome=Outcome.OK, agent_log=str(os.getpid()))
    if store.finish(record): print(number, os.getpid())
"""
    with running(code, store.path, count=2) as children:
        outputs = go(children)
    lines = [line.split() for output in outputs for line in output.splitlines()]
    winners = {f"r-{number}": pid for number, pid in lines}
    assert len(lines) == 50
    for rollout_id, pid in winners.items():
        stored = store.get(rollout_id)
        assert stored is not None
        assert stored.agent_log == pid


def test_four_threads_write_without_loss(store: Store) -> None:
    store.begin(RolloutRecord("shared", "task"))

    def work(thread: int) -> None:
        store.begin(RolloutRecord(f"r-{thread}", "task"))
        for number in range(60):
            prompt = list(range(thread, thread + number))
            store.save_call(f"r-{thread}", Call(f"c{number}", number, prompt_token_ids=prompt))
            store.save_call("shared", Call(f"t{thread}-{number}", number, prompt_token_ids=prompt))
            store.add_event("shared", Event(float(number), f"thread-{thread}"))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert [number for number, _ in store.events("shared")] == list(range(1, 241))
    assert len(store.calls("shared")) == 240
    for thread in range(4):
        for number, call in enumerate(store.calls(f"r-{thread}")):
            assert call.prompt_token_ids == list(range(thread, thread + number))


def test_two_processes_write_to_one_rollout_without_loss(store: Store) -> None:
    store.begin(RolloutRecord("shared", "task"))
    code = """
store = Store.open(folder); ready()
for number in range(60):
    name = f"{os.getpid()}-{number}"
    store.save_call("shared", Call(name, number, request={"messages": [{"n": n} for n in range(number)]}))
    store.add_event("shared", Event(0.0, name))
"""
    with running(code, store.path, count=2) as children:
        go(children)
    assert [number for number, _ in store.events("shared")] == list(range(1, 121))
    calls = store.calls("shared")
    assert len(calls) == 120
    for call in calls:
        assert call.request["messages"] == [{"n": n} for n in range(call.index)]


def test_a_killed_writer_leaves_a_consistent_store(store: Store) -> None:
    code = """
store = Store.open(folder)
store.begin(RolloutRecord("victim", "task")); print("ready", flush=True)
number = 0
while True:
    messages = [{"content": "x" * 2000 + str(n)} for n in range(number % 40)]
    store.save_call("victim", Call(f"c{number}", number, request={"messages": messages}))
    store.put_blob(os.urandom(5000)); number += 1
    if number == 20: print("ready", flush=True)
"""
    with running(code, store.path) as (child,):
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    with Store.open(store.path) as other:
        calls = other.calls("victim")
    assert len(calls) >= 20
    for number, call in enumerate(calls):
        assert call.request["messages"] == [{"content": "x" * 2000 + str(n)} for n in range(number % 40)]
    connection = sqlite3.connect(store.path / "store.db")
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


LEFT = """
store = Store.open(folder)
store.begin(RolloutRecord("left", "task", stage="agent", agent_log="so far"))
store.record_sandbox(SandboxEntry("box", "bwrap", "left", os.getpid(), paths=["/tmp/x"]))
ready()
"""


def test_a_killed_owner_is_recovered_from_once(store: Store) -> None:
    store.begin(RolloutRecord("mine", "task"))
    store.record_sandbox(SandboxEntry("my-box", "bwrap", "mine"))
    ended: list[SandboxEntry] = []

    def end(entry: SandboxEntry) -> bool:
        ended.append(entry)
        return True

    with running(LEFT, store.path) as (child,):
        alive = store.recover(end)
        assert (alive.rollouts, alive.sandboxes) == ([], [])
        child.send_signal(signal.SIGKILL)
        # Not waited for: what is left of it is a zombie, and that is as good as gone.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        recovery = store.recover(end)
        assert (recovery.rollouts, recovery.sandboxes, recovery.failed) == (["left"], ["box"], {})
        assert store.recover(end).rollouts == []
    assert [(entry.sandbox_id, entry.host_pid, entry.paths) for entry in ended] == [("box", child.pid, ["/tmp/x"])]
    record = store.get("left")
    assert record is not None
    assert (record.outcome, record.error) == (Outcome.CANCELLED, "paddock ended before the rollout did")
    assert (record.reward, record.agent_log, record.stage) == (None, "so far", "agent")
    assert record.reward_reason
    assert record.finished_at is not None
    assert [entry.sandbox_id for entry in store.open_sandboxes()] == ["my-box"]
    assert store.list(finished=False)[0].rollout_id == "mine"


def abandon(store: Store, owner: Owner, name: str) -> None:
    """A rollout and a sandbox as that owner would have begun them."""
    store._owner, own = owner, store._owner
    store.begin(RolloutRecord(name, "task"))
    store.record_sandbox(SandboxEntry(f"box-{name}", "bwrap", name))
    store._owner = own


def test_two_processes_recover_each_rollout_once(store: Store) -> None:
    dead = replace(Owner.current(), start_time=1)
    for number in range(40):
        abandon(store, dead, f"left-{number}")
    code = """
store = Store.open(folder); ready()
found = store.recover(lambda entry: True)
print(*found.rollouts, *found.sandboxes)
"""
    with running(code, store.path, count=2) as children:
        outputs = go(children)
    names = sorted(name for output in outputs for name in output.split())
    assert names == sorted([f"left-{n}" for n in range(40)] + [f"box-left-{n}" for n in range(40)])


def test_a_reused_process_number_is_not_its_former_owner(store: Store) -> None:
    here = Owner.current()
    assert here.start_time is not None
    abandon(store, replace(here, start_time=here.start_time - 1), "former")
    abandon(store, here, "present")
    assert store.recover(lambda entry: True).rollouts == ["former"]


def test_owners_that_cannot_be_seen_are_left_alone(store: Store) -> None:
    here = Owner.current()
    abandon(store, replace(here, boot_id="other", hostname="elsewhere"), "machine")
    abandon(store, replace(here, pid=1, start_time=1, pid_namespace="pid:[1]"), "container")
    abandon(store, replace(here, boot_id="before"), "rebooted")
    recovery = store.recover(lambda entry: True)
    assert (recovery.rollouts, recovery.sandboxes) == (["rebooted"], ["box-rebooted"])


def test_a_sandbox_that_cannot_be_ended_is_tried_again(store: Store) -> None:
    abandon(store, replace(Owner.current(), start_time=1), "left")

    def fail(entry: SandboxEntry) -> bool:
        raise OSError("busy")

    assert store.recover(fail).failed == {"box-left": "OSError: busy"}
    assert "box-left" in store.recover(lambda entry: False).failed
    assert store.recover(lambda entry: True).sandboxes == ["box-left"]
    assert store.open_sandboxes() == []


def test_an_ended_sandbox_is_no_longer_open(store: Store) -> None:
    store.record_sandbox(SandboxEntry("box", "bwrap", None, os.getpid(), paths=["/a"], created_at=5.0))
    (entry,) = store.open_sandboxes()
    assert entry == SandboxEntry(
        "box", "bwrap", None, os.getpid(), process_start_time(os.getpid()), ["/a"], 5.0, Owner.current()
    )
    store.end_sandbox("box")
    store.end_sandbox("unknown")
    assert store.open_sandboxes() == []


def test_a_process_that_is_gone_has_no_start_time(tmp_path: Path) -> None:
    with running("ready()", tmp_path) as (child,):
        assert process_start_time(child.pid) is not None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_start_time(child.pid) is None


@pytest.mark.parametrize("name", ["pid", "start_time", "boot_id", "hostname"])
def test_an_owner_is_named_by(name: str) -> None:
    assert getattr(Owner.from_text(Owner.current().to_text()), name) is not None
