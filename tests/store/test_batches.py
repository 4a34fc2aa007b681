"""Batches with their progress, causes of what broke, and rewards as lines of a chart."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paddock.store import Store
from paddock.store.batches import read_batches, read_causes
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.store.reward_series import read_series
from paddock.store.search import Search, cause_of

REQUEST = "the endpoint answered 503 after 5 tries (request 8f00712a)"
OTHER_REQUEST = "the endpoint answered 503 after 12 tries (request 77ab0c1d)"


def ended(name: str, batch: str, member: int, reward: float | None, at: float, **more: object) -> RolloutRecord:
    values = {"outcome": Outcome.OK, "task_id": "task", "agent": "pi", "weight_version": "9", **more}
    return RolloutRecord(
        name, batch_id=batch, batch_size=4, member=member, reward=reward, started_at=at, finished_at=at + 2, **values
    )  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path) as opened:
        broke = {"outcome": Outcome.MODEL, "error": REQUEST}
        for record in (
            ended("r-0", "b-old", 0, 1.0, 10.0),
            ended("r-1", "b-old", 1, 0.0, 20.0, task_id="other"),
            ended("r-2", "b-new", 0, None, 30.0, **broke),
            ended("r-3", "b-new", 0, 1.0, 40.0, weight_version="10"),
            ended("r-4", "b-new", 1, None, 50.0, **{**broke, "error": OTHER_REQUEST}),
        ):
            opened.finish(record)
        opened.begin(RolloutRecord("r-5", "task", batch_id="b-new", batch_size=4, member=1, started_at=60.0))
        yield opened


def test_batches_have_their_progress(store: Store) -> None:
    total, [new, old] = store.query(read_batches, limit=10)
    assert (total, new.batch_id, old.batch_id) == (2, "b-new", "b-old")
    # One member was tried twice; another broke, and is running again.
    assert (new.size, new.done, new.running, new.finished, new.rewards.count) == (4, 1, 1, 1, 4)
    assert (old.done, old.tasks, old.rewards.scored, old.rewards.passed) == (2, 2, 2, 1)
    assert (old.began, old.last, old.agents) == (10.0, 22.0, ["pi"])
    assert store.query(read_batches, batch="b-old", limit=10) == (1, [old])
    assert store.query(read_batches, offset=1, limit=1) == (2, [old])
    assert store.query(read_batches, batch="b-none", limit=1) == (0, [])


def test_what_was_cancelled_is_left(store: Store) -> None:
    store.finish(ended("r-6", "b-old", 2, None, 25.0, outcome=Outcome.CANCELLED, error="stopped"))
    _, [batch] = store.query(read_batches, batch="b-old", limit=1)
    assert (batch.done, batch.cancelled, batch.rewards.count, batch.size) == (2, 1, 3, 4)


def test_the_same_cause_is_there_once(store: Store) -> None:
    total, [cause] = store.query(read_causes, Search())
    assert (total, cause.outcome, cause.count, cause.tasks) == (2, "model", 2, 1)
    assert (cause.error, cause.rollouts) == (OTHER_REQUEST, ["r-4", "r-2"])
    assert store.query(read_causes, Search(cause=cause.cause))[0] == 2
    assert store.query(read_causes, Search(batch="b-old")) == (0, [])


def test_a_cause_has_no_numbers_and_ids() -> None:
    assert cause_of("model", REQUEST) == cause_of("model", OTHER_REQUEST)
    assert cause_of("agent", "exit code 1 at 0x7ffe12") == "exit code … at …"
    assert cause_of("agent", "unexpectedly terminated") == "unexpectedly terminated"
    assert cause_of("ok", "anything") == cause_of("agent", None) == cause_of(None, "running") == ""


def test_rewards_are_summed_by_batch_version_and_time(store: Store) -> None:
    by_batch = store.query(read_series, Search(), axis="batch", split=None, intervals=4)
    assert by_batch.places == ["b-old", "b-new"]
    points = by_batch.lines[""]
    assert [(points[place].scored, points[place].total) for place in (0, 1)] == [(2, 1.0), (1, 1.0)]
    by_version = store.query(read_series, Search(), axis="weights", split="task", intervals=4)
    assert by_version.places == ["9", "10"]
    assert {name: sorted(points) for name, points in by_version.lines.items()} == {"task": [0, 1], "other": [0]}
    by_time = store.query(read_series, Search(running=False), axis="time", split=None, intervals=4)
    assert by_time.places == [10.0, 20.0, 30.0, 40.0]
    assert [by_time.lines[""][place].count for place in range(4)] == [1, 1, 1, 2]


def test_only_the_lines_with_the_most_rollouts_are_read(store: Store) -> None:
    for number in range(9):
        store.finish(ended(f"r-more-{number}", "b-more", number, 1.0, 70.0, agent=f"agent-{number}"))
    series = store.query(read_series, Search(), axis="time", split="agent", intervals=4)
    assert (len(series.lines), series.line_count) == (6, 11)
    assert next(iter(series.lines)) == "pi"
    nothing = store.query(read_series, Search(task="none"), axis="time", split=None, intervals=4)
    assert (nothing.places, nothing.lines) == ([], {})
