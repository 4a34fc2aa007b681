"""Trees of rollouts: a fork refers to its source, is read whole, and outlives it."""

import time
from copy import deepcopy
from dataclasses import replace

import pytest
from bench.rollout_store import growing_calls

from paddock.capture.trace import Call, Event
from paddock.store import Store, bulk_read, partial_read, rows, sequences
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.store.recovery import Owner

CALLS = 8
LOG = "".join(f"line {number}\n" for number in range(500))


def save(store: Store, name: str, calls: list[Call], *, age: float, reward: float = 1.0, **fork: object) -> None:
    record = RolloutRecord(name, "task", fork=fork, started_at=time.time() - age - 1, agent_log=LOG)
    store.begin(record)
    for call in calls:
        store.save_call(name, call)
        for event in events_of(name, call):
            store.add_event(name, event)
    record.outcome, record.reward, record.finished_at = Outcome.OK, reward, time.time() - age
    store.finish(record)


def events_of(name: str, call: Call) -> list[Event]:
    """Two events as an agent reports them: a long one, and at another time in each rollout a short one."""
    return [
        Event(call.started, "agent_text", {"text": str(call.message)}),
        Event(len(name), "call", {"call": call.id}),
    ]


def forked(source: str, calls: list[Call], at: int, seed: int) -> list[Call]:
    """Calls of a fork: those before `at` are repeated at other times, the rest is new."""
    repeated = [
        replace(
            deepcopy(call),
            started=call.started + 1000.5,
            session=f"session-{seed}",
            replayed_from=call.replayed_from or f"{source}/{call.id}",
            is_copy=True,
        )
        for call in calls[:at]
    ]
    new = list(growing_calls(CALLS, seed=1, branch=at, branch_seed=seed))
    return [*repeated, *new[at:]]


@pytest.fixture
def family(store: Store) -> dict[str, list[Call]]:
    """A rollout, a fork of it, and a fork of the fork."""
    first = list(growing_calls(CALLS))
    second = forked("first", first, 3, seed=2)
    third = forked("second", second, 5, seed=3)
    save(store, "first", first, age=3000, reward=0.0)
    save(store, "second", second, age=2000, source="first", at=3)
    save(store, "third", third, age=1000, source="second", at=5)
    return {"first": first, "second": second, "third": third}


def check_whole(store: Store, name: str, calls: list[Call]) -> None:
    """Each way to read a rollout gives all of it."""
    assert store.calls(name) == calls
    record = store.get(name)
    assert record is not None
    assert record.agent_log == LOG
    if store.events(name):
        expected = [event for call in calls for event in events_of(name, call)]
        assert list(enumerate(expected, 1)) == store.events(name)
        assert store.events(name, after=3, limit=2) == [*enumerate(expected, 1)][3:5]
    key = store.query(rows.find, name)
    assert key is not None
    heads = store.query(partial_read.heads, key)
    assert [(head.id, head.values["started"]) for head in heads] == [(call.id, call.started) for call in calls]
    [(_, sampled)] = store.query(bulk_read.read, [key])
    for call, head, short in zip(calls, heads, sampled, strict=True):
        assert list(short.prompt_token_ids) == call.prompt_token_ids
        assert list(short.logprobs) == call.logprobs
        assert (short.replayed_from, short.is_copy, short.session) == (call.replayed_from, call.is_copy, call.session)
        assert store.query(partial_read.completion, key, call.id).ids == call.completion_token_ids
        prompt = store.query(sequences.PromptReader().get, head.prompt)
        assert len(prompt) == 4 * len(call.prompt_token_ids)


def stored_calls(store: Store) -> int:
    with store._database.read() as connection:
        return int(connection.execute("SELECT count(*) FROM calls").fetchone()[0])


def test_a_fork_stores_only_its_own_calls(store: Store, family: dict[str, list[Call]]) -> None:
    assert stored_calls(store) == CALLS + (CALLS - 3) + (CALLS - 5)
    for name, calls in family.items():
        check_whole(store, name, calls)


def test_events_that_repeat_those_of_the_source_are_differences(store: Store, family: dict[str, list[Call]]) -> None:
    with store._database.read() as connection:
        sizes = dict(connection.execute("SELECT rollout, sum(length(data)) FROM events GROUP BY rollout").fetchall())
    assert sizes[2] < 0.8 * sizes[1]
    store.add_event("first", Event(1.0, "outcome", {"text": "added later"}))
    check_whole(store, "third", family["third"])


def test_a_fork_is_read_whole_by_another_process(store: Store, family: dict[str, list[Call]]) -> None:
    with Store.open(store.path) as other:
        other.save_call("third", family["third"][-1])
        other.save_call("third", family["third"][1])
        for name, calls in family.items():
            check_whole(other, name, calls)


def test_the_tree_names_parents_and_branch_points(store: Store, family: dict[str, list[Call]]) -> None:
    save(store, "fourth", family["first"][:1], age=500, source="first", at=1)
    expected = [("first", None, None), ("second", "first", 3), ("third", "second", 5), ("fourth", "first", 1)]
    for name in ("first", "third", "fourth"):
        assert [(each.rollout_id, each.parent, each.at) for each in store.tree(name)] == expected
    assert [each.reward for each in store.tree("third")] == [0.0, 1.0, 1.0, 1.0]
    assert [each.rollout_id for each in store.children("first")] == ["second", "fourth"]


@pytest.mark.parametrize("pruned", [["first"], ["first", "second"]])
def test_a_fork_outlives_its_sources(store: Store, family: dict[str, list[Call]], pruned: list[str]) -> None:
    assert store.prune(max_age_seconds={1: 2500, 2: 1500}[len(pruned)]).rollouts == pruned
    assert sorted(each.rollout_id for each in store.list()) == sorted(family.keys() - set(pruned))
    assert store.get("first") is None
    for name in family.keys() - set(pruned):
        check_whole(store, name, family[name])
    assert [each.key is None for each in store.tree("third")] == [name in pruned for name in family]


@pytest.mark.parametrize("at", [0, CALLS - 1])
def test_a_fork_at_the_first_or_the_last_call_is_whole(store: Store, at: int) -> None:
    first = list(growing_calls(CALLS))
    save(store, "first", first, age=3000)
    calls = forked("first", first, at, seed=2)[: at + 1]
    save(store, "second", calls, age=1000, source="first", at=at)
    check_whole(store, "second", calls)
    store.delete(["first"])
    check_whole(store, "second", calls)


def test_what_no_fork_needs_is_pruned_at_once(store: Store, family: dict[str, list[Call]]) -> None:
    store.prune(max_age_seconds=2500)
    assert stored_calls(store) == 3 + (CALLS - 3) + (CALLS - 5)
    store.prune(max_age_seconds=1500)
    assert stored_calls(store) == 3 + 2 + (CALLS - 5)


def test_the_last_fork_takes_everything_with_it(store: Store, family: dict[str, list[Call]]) -> None:
    store.prune(max_age_seconds=1500)
    store.prune(max_age_seconds=500)
    with store._database.read() as connection:
        for table in (
            "rollouts",
            "events",
            "forks",
            "calls",
            "sequences",
            "blobs",
            "blob_references",
            "figures",
            "bodies",
        ):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] == 0, table


def test_the_id_of_a_pruned_source_is_free(store: Store, family: dict[str, list[Call]]) -> None:
    store.prune(max_age_seconds=2500)
    again = forked("first", family["first"], 2, seed=7)
    save(store, "late", again, age=100, source="first", at=2)
    check_whole(store, "late", again)
    save(store, "first", family["first"], age=50)
    store.prune(max_age_seconds=10)
    assert store.count() == 0


def test_a_call_that_is_not_the_recorded_one_is_stored_itself(store: Store, family: dict[str, list[Call]]) -> None:
    changed = forked("first", family["first"], 4, seed=9)
    changed[1].logprobs[0] -= 1.0
    changed[2].request["messages"][1]["content"] = "Another text."
    changed[3].attempts = [{"status": 502}]
    before = stored_calls(store)
    save(store, "changed", changed, age=0, source="first", at=4)
    check_whole(store, "changed", changed)
    assert stored_calls(store) == before + 1 + CALLS - 4


def test_a_killed_fork_counts_the_calls_that_it_replayed(
    store: Store, family: dict[str, list[Call]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is resumed continues the rollout with the most calls."""
    monkeypatch.setattr(store, "_owner", replace(Owner.current(), start_time=1))
    store.begin(RolloutRecord("killed", "task", fork={"source": "second", "at": 5}))
    for call in family["third"][:6]:
        store.save_call("killed", call)
    assert store.recover(lambda entry: True).rollouts == ["killed"]
    record = store.get("killed")
    assert record is not None
    assert (record.outcome, record.call_count) == (Outcome.CANCELLED, 6)


def test_a_source_that_is_pruned_under_a_running_fork_stays_readable(store: Store) -> None:
    first = list(growing_calls(CALLS))
    save(store, "first", first, age=3000)
    calls = forked("first", first, 3, seed=2)
    store.begin(RolloutRecord("second", "task", fork={"source": "first", "at": 3}, agent_log=LOG))
    for number, call in enumerate(calls):
        if number in (2, 4):
            store.prune(max_bytes=0)
        store.save_call("second", call)
    check_whole(store, "second", calls)
    assert store.query(rows.find, "prun") is None
    store.finish(RolloutRecord("second", "task", outcome=Outcome.OK, fork={"source": "first", "at": 3}))
    store.prune(max_bytes=0)
    assert stored_calls(store) == 0
