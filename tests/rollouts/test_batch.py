"""Many rollouts: the bound, the new tries, going on after a stop, and counts that balance."""

import asyncio
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddock.capture.upstream import Upstream
from paddock.cli.rollout import reasons
from paddock.errors import ConfigError, ConnectFailed, PaddockError
from paddock.limits import RolloutTimeouts
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.rollouts import batch as batches
from paddock.rollouts.api import run_batch
from paddock.rollouts.batch import Batch, BatchGroup, BatchResult
from paddock.rollouts.config import RunConfig
from paddock.rollouts.context import RunContext
from paddock.rollouts.loop.session import ToolSessions
from paddock.rollouts.rollout import Rollout
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from rollouts.loop.fake_session import FakeSession
from rollouts.played import NOBODY_THERE, SOLVES, a_task, needs_bwrap, own_children, run, shell, speaker

pytestmark = needs_bwrap


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as reopened:
        yield reopened
        assert reopened.count(finished=False) == 0
        assert reopened.open_sandboxes() == []
    assert own_children() == []


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once."""
    monkeypatch.setattr(batches, "PAUSE_SECONDS", 0.01)


def tasks(count: int, **changes: Any) -> list[Any]:
    return [a_task(id=f"t{number}", **changes) for number in range(count)]


async def batch(store: Store, count: int = 1, **options: Any) -> BatchResult:
    chosen: dict[str, Any] = {"model": NOBODY_THERE, "agent": shell("echo 42 > answer.txt"), **options}
    return await run_batch(chosen.pop("tasks", None) or tasks(count), store=store, **chosen)


def balances(result: BatchResult, store: Store) -> None:
    """Every member has one outcome, and the store knows every one of them."""
    summary = result.summary()
    assert summary["rollouts"] == len(result.records) == sum(summary["outcomes"].values())
    assert len({(record.task_id, record.member) for record in result.records}) == len(result.records)
    for record in result.records:
        stored = store.get(record.rollout_id)
        assert stored is not None
        assert (stored.outcome, stored.reward, stored.batch_id) == (record.outcome, record.reward, result.batch_id)


def test_each_task_has_a_group_of_its_own(store: Store) -> None:
    result = run(batch(store, 2, n=3, parallel=3))
    balances(result, store)
    assert [(group.task_id, len(group.records), group.mean) for group in result.groups] == [
        ("t0", 3, 1.0),
        ("t1", 3, 1.0),
    ]
    assert [record.member for record in result.records] == [0, 1, 2, 0, 1, 2]


def test_keys_of_task_toml_without_effect_are_logged_once(store: Store) -> None:
    lines: list[str] = []
    some = tasks(3, metadata={"unknown_keys": ["environment.memory_bm"]})
    run(batch(store, tasks=some, log=lines.append))
    warning = f"task.toml of {some[0].id} and 2 more has keys that have no effect: environment.memory_bm"
    assert lines.count(warning) == 1


def test_no_more_than_so_many_run_at_a_time(store: Store) -> None:
    running: set[str] = set()
    most = 0

    def watch(rollout: Rollout) -> None:
        nonlocal most
        (running.discard if rollout.record.finished else running.add)(rollout.id)
        most = max(most, len(running))

    result = run(batch(store, n=6, parallel=2, on_change=watch, agent=shell("sleep 0.1")))
    balances(result, store)
    assert most == 2


def test_one_that_breaks_stops_no_other(store: Store) -> None:
    broken = a_task(id="broken", setup="exit 1")
    result = run(batch(store, tasks=[broken, *tasks(3)], parallel=4))
    balances(result, store)
    assert [record.outcome for record in result.records] == [Outcome.TASK, *[Outcome.OK] * 3]
    assert result.summary()["outcomes"] == {"task": 1, "ok": 3}
    assert result.summary()["mean_reward"] == 1.0


@pytest.mark.usefixtures("hasty")
def test_only_failures_around_the_policy_are_tried_again(store: Store) -> None:
    async def act() -> BatchResult:
        # The first two conversations get nothing but 500; each member is one.
        script = {**SOLVES, "faults": [{"status": 500, "times": 4}]}
        async with ReplayServer(script) as server:
            endpoint = Endpoint(server.url, "replay", engine="vllm")
            quick = RolloutTimeouts(model_call=0.8, agent=20)
            return await batch(store, tasks=tasks(1, timeouts=quick), model=endpoint, agent=speaker(), retries=2)

    result = run(act())
    balances(result, store)
    (record,) = result.records
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0)
    attempts = sorted((each.attempt, str(each.outcome)) for each in store.list(batch_id=result.batch_id))
    assert attempts[0] == (0, "model")
    assert attempts[-1] == (record.attempt, "ok")
    assert all(outcome == "model" for _, outcome in attempts[:-1])


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("verifier", "setup", "agent", "outcome"),
    [
        ("true", "", "true", Outcome.VERIFIER),
        ("true", "exit 1", "true", Outcome.TASK),
        ("echo 0 > /logs/verifier/reward.txt", "", "rm -rf ~/workdir", Outcome.OK),
        ("echo 0 > /logs/verifier/reward.txt", "", "exit 127", Outcome.AGENT),
    ],
)
def test_what_the_policy_or_the_task_broke_is_not_tried_again(
    store: Store, verifier: str, setup: str, agent: str, outcome: Outcome
) -> None:
    result = run(batch(store, tasks=tasks(1, verifier=verifier, setup=setup), agent=shell(agent), retries=3))
    assert [record.outcome for record in store.list(batch_id=result.batch_id)] == [outcome]


@pytest.mark.usefixtures("hasty")
def test_tries_have_an_end(store: Store) -> None:
    quick = RolloutTimeouts(model_call=0.3, agent=20)
    result = run(batch(store, tasks=tasks(1, timeouts=quick), agent=speaker(), retries=2))
    balances(result, store)
    assert sorted(record.attempt for record in store.list(batch_id=result.batch_id)) == [0, 1, 2]
    assert result.records[0].attempt == 2


def test_one_member_is_filled_again_and_the_others_are_left(store: Store) -> None:
    """A group of three of which one was cancelled: the same batch again runs that one alone."""

    agent = shell("echo 42 > answer.txt; sleep 0.1")

    async def act() -> tuple[BatchResult, BatchResult]:
        aborted: list[asyncio.Task[None]] = []

        def watch(rollout: Rollout) -> None:
            if rollout.record.member == 1 and rollout.record.stage == "agent" and not aborted:
                aborted.append(asyncio.ensure_future(rollout.abort()))

        first = await batch(
            store,
            n=3,
            parallel=3,
            batch_id="b-fill",
            retries=0,
            on_change=watch,
            agent=agent,
        )
        second = await batch(store, n=3, parallel=3, resume="b-fill", retries=0, agent=agent)
        return first, second

    first, second = run(act())
    balances(second, store)
    assert [str(record.outcome) for record in first.records] == ["ok", "cancelled", "ok"]
    assert [str(record.outcome) for record in second.records] == ["ok", "ok", "ok"]
    ids = [(one.rollout_id == other.rollout_id) for one, other in zip(first.records, second.records, strict=True)]
    assert ids == [True, False, True]
    assert store.count(batch_id="b-fill") == 4


def test_a_batch_that_was_cancelled_goes_on_where_it_was(store: Store) -> None:
    settled: list[str] = []
    agent = shell("echo 42 > answer.txt; sleep 0.05")

    async def stopped() -> None:
        enough = asyncio.Event()

        def settle(record: RolloutRecord) -> None:
            settled.append(record.rollout_id)
            if len(settled) == 2:
                enough.set()

        running = asyncio.ensure_future(
            batch(
                store,
                n=6,
                parallel=2,
                batch_id="b-stop",
                on_settled=settle,
                agent=agent,
            )
        )
        await enough.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(stopped())
    assert store.count(finished=False) == 0
    done = {record.rollout_id for record in store.list(batch_id="b-stop", outcome="ok")}
    assert done >= set(settled)
    result = run(batch(store, n=6, parallel=3, resume="b-stop", agent=agent))
    balances(result, store)
    assert result.summary()["outcomes"] == {"ok": 6}
    assert {record.batch_size for record in result.records} == {6}
    assert done <= {record.rollout_id for record in result.records}


def test_a_batch_that_is_done_runs_nothing(store: Store) -> None:
    first = run(batch(store, 2, n=2, batch_id="b-done"))
    second = run(batch(store, 2, n=2, resume="b-done"))
    assert [record.rollout_id for record in first.records] == [record.rollout_id for record in second.records]


def test_a_store_that_fails_says_so_and_every_rollout_it_knows_has_an_outcome(tmp_path: Path) -> None:
    """One error of ours, not a group of them, and nothing is left running."""
    with Store.open(tmp_path / "store") as store:

        def fill(rollout: Rollout) -> None:
            if rollout.record.stage == "agent":
                with store._database.autocommit() as connection:
                    connection.execute("PRAGMA max_page_count = 1")

        script = shell(f"echo {os.urandom(6000).hex()} > noise; head -c 400K /dev/urandom > big; sleep 0.1")
        options: dict[str, Any] = {"parallel": 2, "retries": 0, "on_change": fill, "agent": script}
        try:
            outcomes = [record.outcome for record in run(batch(store, n=4, **options)).records]
        except PaddockError as error:
            outcomes = [error.message]
        finally:
            with store._database.autocommit() as connection:
                connection.execute(f"PRAGMA max_page_count = {2**31}")
        assert None not in outcomes
        assert store.count(finished=False) == 0
    assert own_children() == []


@pytest.mark.parametrize("wrong", [{"n": 0}, {"parallel": 0}, {"retries": -1}])
def test_numbers_that_make_no_sense_are_refused(store: Store, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        run(batch(store, **wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_logprobs": 21},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"agent_timeout": 0.0},
        {"agent_timeout": math.nan},
        {"context_tokens": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_runs(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        RunConfig(model=NOBODY_THERE, **wrong)


def test_two_tasks_of_one_name_are_refused(store: Store) -> None:
    with pytest.raises(ConfigError):
        run(batch(store, tasks=[*tasks(1), *tasks(1)]))


def test_the_config_is_kept_with_each_rollout(store: Store) -> None:
    async def act() -> BatchResult:
        async with Upstream() as upstream:
            config = RunConfig(model=NOBODY_THERE, agent=shell("true"), temperature=0.5)
            context = RunContext.create(config, endpoint=NOBODY_THERE, store=store, upstream=upstream)
            return await Batch(tasks(1), context).run()

    (record,) = run(act()).records
    stored = store.get(record.rollout_id)
    assert stored is not None
    assert (stored.config["temperature"], stored.config["budget"]["calls"], stored.config["model_name"]) == (
        0.5,
        200,
        "nobody",
    )


def group(*rewards: float | None) -> BatchGroup:
    return BatchGroup("t", [RolloutRecord(f"r{number}", "t", reward=reward) for number, reward in enumerate(rewards)])


@pytest.mark.parametrize(
    ("rewards", "k", "expected"),
    [
        ((1, 0, 0, 0), 1, 0.25),
        ((1, 0, 0, 0), 2, 0.5),
        ((1, 0, 0, 0), 4, 1.0),
        ((1, 1, 0, 0), 2, 1 - 1 / 6),
        ((1, 1, 1, 0), 2, 1.0),
        ((0, 0), 2, 0.0),
        ((0.99, 1.0), 1, 0.5),
        ((1, None, None), 1, 1.0),
        ((1, None, None), 2, None),
        ((), 1, None),
        ((1,), 0, None),
    ],
)
def test_pass_at_k_counts_only_known_rewards(
    rewards: tuple[float | None, ...], k: int, expected: float | None
) -> None:
    result = group(*rewards).pass_at(k)
    assert result == (None if expected is None else pytest.approx(expected))


def test_a_mean_is_unknown_without_rewards() -> None:
    assert group(None, None).mean is None
    assert group(None, 0.5, 1.0).mean == 0.75


# -- what keeps all of them out ---------------------------------------------------------------------


class Behind(FakeSession):
    """A place that cannot be reached at first."""

    def __init__(self, tries: list[int], closed: int) -> None:
        super().__init__()
        self.tries = tries
        self.closed = closed

    async def open(self) -> None:
        self.tries.append(len(self.tries))
        if len(self.tries) <= self.closed:
            raise ConnectFailed("nobody is there")


async def looped(store: Store, tries: list[int], *, closed: int, n: int, **options: Any) -> BatchResult:
    async with Upstream() as upstream, ReplayServer({"turns": [{"text": "Done."}]}) as server:
        endpoint = Endpoint(server.url, "replay", engine="vllm")
        fields = {"parallel": 2, "retries": 2, **options}
        config = RunConfig(model=endpoint, agent="loop", n=n, **fields)
        sessions = ToolSessions(lambda _: Behind(tries, closed), "fake")
        context = RunContext.create(config, endpoint=endpoint, store=store, upstream=upstream, sessions=sessions)
        return await Batch(tasks(1), context).run()


@pytest.mark.usefixtures("hasty")
def test_what_fails_for_all_is_tried_again_by_one(store: Store) -> None:
    tries: list[int] = []
    result = run(looped(store, tries, closed=1000, n=20))
    balances(result, store)
    assert {(record.outcome, record.error) for record in result.records} == {(Outcome.ENVIRONMENT, "nobody is there")}
    # Both that had begun, and two more tries of one of them.
    assert len(tries) == 4
    assert store.count(batch_id=result.batch_id) == 20 + 2


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("parallel", [1, 2, 5])
def test_a_dependency_that_recovers_keeps_the_breaker_closed(store: Store, parallel: int) -> None:
    result = run(looped(store, [], closed=parallel + 1, n=6, parallel=parallel, retries=3))
    balances(result, store)
    assert result.summary()["outcomes"] == {"ok": 6}


@pytest.mark.usefixtures("hasty")
def test_a_missing_engine_is_reported_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    result = run(batch(store, n=5, sandbox="docker", retries=1))
    balances(result, store)
    (reason,) = reasons(result)
    assert reason.startswith("no container runtime answers at ")
    assert store.count(batch_id=result.batch_id) == 5 + 1
