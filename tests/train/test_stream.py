"""The stream: what it delivers and in which order, what it leaves out, and how it goes on after a kill."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddock.errors import ConfigError, StoreError, StreamError
from paddock.models.endpoint import Endpoint
from paddock.rollouts.config import RunConfig
from paddock.store import Store
from paddock.train.sources import Source
from paddock.train.stream import Stream
from paddock.train.stream_config import StreamConfig
from paddock.train.training_view import read_training
from rollouts.played import a_task, needs_bwrap, speaker
from train.streaming import SCRIPT, Place, Streams, ids, run, tasks


def test_groups_come_in_the_order_in_which_they_finish(tmp_path: Path) -> None:
    async def work() -> None:
        place = Place()
        place.hold("t0")
        async with (
            Streams(tmp_path) as streams,
            streams.stream(streams.source(place, tasks(3), parallel=6), batch_size=3, rounds=1) as stream,
        ):
            first = await stream.take(2)
            assert sorted(ids(first)) == ["t1", "t2"]
            place.release("t0")
            assert ids(await stream.take(9)) == ["t0"]
            assert stream.statistics().delivered == 6

    run(work())


def test_a_group_has_its_samples_and_their_advantages(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            Streams(tmp_path) as streams,
            streams.stream(streams.source(Place(), tasks(1)), version=4, rounds=1) as stream,
        ):
            (group,) = await stream.take(1)
            assert (sorted(group.rewards), group.versions, group.staleness) == ([0.0, 1.0], (4, 4), 0)
            better, worse = sorted(group.samples, key=group.advantage, reverse=True)
            assert group.advantage(better) == pytest.approx(1.0, abs=1e-3)
            assert group.advantage(worse) == pytest.approx(-1.0, abs=1e-3)
            assert better.group_id == worse.group_id

    run(work())


def test_new_groups_wait_for_an_update_and_finished_ones_are_kept(tmp_path: Path) -> None:
    async def work() -> None:
        place = Place()
        async with (
            Streams(tmp_path) as streams,
            streams.stream(streams.source(place, tasks(50)), batch_size=2, max_staleness=1) as stream,
        ):
            staleness = []
            for version in range(1, 6):
                groups = await stream.take(2)
                staleness += [group.staleness for group in groups]
                await stream.acknowledge(*groups)
                await stream.update_weights(version)
            assert max(staleness) <= 1
            assert stream.statistics().left_out == {}
            # 10 groups were taken, and 4 more may be under way: two batches.
            assert len(place.started) <= 2 * (10 + 4)

    run(work())


def test_an_update_that_would_make_a_group_too_old_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            Streams(tmp_path) as streams,
            streams.stream(streams.source(Place(), tasks(9)), batch_size=2, max_staleness=0) as stream,
        ):
            await stream.take(1)
            with pytest.raises(StreamError, match="1 units") as caught:
                await stream.update_weights(1)
            assert caught.value.data["due"] == stream.due(1) == 1
            await stream.take(1)
            await stream.update_weights(1)
            assert (await stream.take(1))[0].versions == (1, 1)

    run(work())


def test_a_version_that_jumps_leaves_out_what_is_too_old_with_a_reason(tmp_path: Path) -> None:
    """A trainer that was killed with groups in its hands, and goes on with later weights than the stream knows."""

    async def work() -> None:
        async with Streams(tmp_path) as streams:
            source = streams.source(Place(), tasks(6))
            # A rollout that was cancelled runs again, and may then have the reward of the other one.
            options = {"name": "run", "batch_size": 2, "rounds": 1, "max_staleness": 1, "zero_advantage": "keep"}
            async with streams.stream(source, **options) as stream:
                await stream.take(2)
            async with streams.stream(source, version=5, **options) as stream:
                groups = []
                while batch := await stream.take():
                    groups += batch
                    await stream.acknowledge()
                    await stream.update_weights(stream.version + 1)
                old = stream.statistics().left_out["too old"]
            assert old >= 4
            assert len(groups) == 6 - old // 2
            assert all(group.staleness <= 1 for group in groups)
            assert read_training(tmp_path, "run").units["dropped"] == old // 2

    run(work())


def test_an_engine_that_counts_other_versions_fails_the_stream(tmp_path: Path) -> None:
    async def work() -> None:
        script = {**SCRIPT, "engine": "sglang", "weight_version": "step-1"}
        async with Streams(tmp_path, script) as streams:
            streams.endpoint = Endpoint(streams.server.url, "replay", engine="sglang")
            async with streams.stream(streams.source(Place(), tasks(9)), version=9, max_failures=4) as stream:
                with pytest.raises(StreamError, match="in a row were too old") as caught:
                    await anext(stream)
                assert stream.statistics().left_out["too old"] >= 4
                assert "counts its versions" in str(caught.value.hint)

    run(work())


def test_weights_are_loaded_while_the_stream_is_paused(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            Streams(tmp_path) as streams,
            streams.stream(streams.source(Place(), tasks(9)), batch_size=1) as stream,
        ):
            seen = []

            async def load() -> None:
                seen.append((stream.statistics().paused, stream.statistics().version))

            await stream.take(1)
            await stream.update_weights(1, load)
            assert seen == [(True, 0)]
            assert (stream.statistics().paused, stream.statistics().version) == (False, 1)

    run(work())


@pytest.mark.parametrize(("policy", "rewards"), [("drop", [[0.0, 1.0]]), ("keep", [[0.0, 1.0], [1.0, 1.0]])])
def test_groups_without_signal(policy: str, rewards: list[list[float]], tmp_path: Path) -> None:
    async def work() -> None:
        place = Place(lambda task, number: 1.0 if task.id == "t0" else float(number % 2))
        async with (
            Streams(tmp_path) as streams,
            streams.stream(streams.source(place, tasks(2), parallel=2), rounds=1, zero_advantage=policy) as stream,
        ):
            assert sorted(sorted(group.rewards) for group in await stream.take(9)) == rewards
            assert stream.statistics().left_out == ({} if policy == "keep" else {"zero advantage": 2})

    run(work())


def test_a_group_without_signal_is_sampled_again(tmp_path: Path) -> None:
    async def work() -> None:
        place = Place(lambda _, number: 0.0 if number <= 2 else float(number % 2))
        async with (
            Streams(tmp_path) as streams,
            streams.stream(streams.source(place, tasks(1)), rounds=1, zero_advantage="resample") as stream,
        ):
            (group,) = await stream.take(9)
            assert sorted(group.rewards) == [0.0, 1.0]
            assert stream.statistics().resampled == 1
            assert stream.statistics().left_out == {"zero advantage": 2}

    run(work())


def test_a_group_that_waits_to_be_sampled_again_does_so_after_a_kill(tmp_path: Path) -> None:
    async def work() -> None:
        place = Place(lambda task, number: float(task.id == "t0" and number > 2 and number % 2))
        place.hold("t1")
        async with Streams(tmp_path) as streams:
            options = {"name": "run", "rounds": 1, "zero_advantage": "resample", "max_staleness": None}
            # The second group keeps the slot that the first would need to be sampled again.
            source = streams.source(place, tasks(2), parallel=2)
            async with streams.stream(source, **options) as stream:
                while not stream.statistics().left_out:
                    await asyncio.sleep(0.01)
            place.release("t1")
            async with streams.stream(source, **options) as stream:
                (group,) = await stream.take(9)
            assert (group.task.id, sorted(group.rewards)) == ("t0", [0.0, 1.0])

    run(work())


def test_rollouts_that_cannot_be_trained_on_are_counted_by_reason(tmp_path: Path) -> None:
    async def work() -> None:
        place = Place(lambda _, number: None if number == 1 else float(number))
        async with Streams(tmp_path) as streams:
            source = streams.source(place, tasks(1), n=3)
            async with streams.stream(source, rounds=1) as stream:
                (group,) = await stream.take(9)
                assert (len(group.rollouts), group.rewards) == (2, [2.0, 3.0])
                assert stream.statistics().left_out == {"unscored: verifier": 1}
            async with streams.stream(source, rounds=1, max_tokens=1) as stream:
                assert await stream.take(9) == []
                assert stream.statistics().left_out == {"too long": 3}

    run(work())


def test_rollouts_are_delivered_alone_but_share_their_group(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            Streams(tmp_path) as streams,
            streams.stream(streams.source(Place(), tasks(2)), deliver="rollout", batch_size=4, rounds=1) as stream,
        ):
            units = await stream.take(9)
            assert [len(unit.rollouts) for unit in units] == [1] * 4
            groups = [unit.samples[0].group_id for unit in units]
            assert sorted(groups.count(name) for name in set(groups)) == [2, 2]
            with pytest.raises(StreamError, match="delivered alone"):
                units[0].advantage(units[0].samples[0])

    run(work())


def test_sources_are_mixed_by_their_weights(tmp_path: Path) -> None:
    async def work() -> None:
        async with Streams(tmp_path) as streams:
            often = streams.source(Place(), tasks(40, "often"), name="often", weight=3, parallel=16)
            rarely = streams.source(Place(), tasks(40, "rarely"), name="rarely", parallel=16)
            async with streams.stream(often, rarely, batch_size=4, max_staleness=0) as stream:
                names = [group.source for group in await stream.take(4)]
                assert (names.count("often"), names.count("rarely")) == (3, 1)

    run(work())


@needs_bwrap
def test_agents_in_sandboxes_and_loops_in_environments_feed_one_stream(tmp_path: Path) -> None:
    async def work() -> None:
        answer = {"tool": "bash", "arguments": {"command": "echo 42 > answer.txt"}}
        script = {"tasks": [{"when": "42", "turns": [answer]}, {"when": "Do it", "turns": [{"text": "Done."}]}]}
        async with Streams(tmp_path, script) as streams:
            options = {"n": 2, "parallel": 2, "store": tmp_path, "name": "sandboxes"}
            sandboxes = Source.create(streams.endpoint, [a_task()], agent=speaker(), **options)
            loops = streams.source(Place(), tasks(1), name="loops")
            async with streams.stream(sandboxes, loops, batch_size=2, rounds=1, zero_advantage="keep") as stream:
                groups = {group.source: group for group in await stream.take()}
        assert groups["sandboxes"].rewards == [1.0, 1.0]
        assert sorted(groups["loops"].rewards) == [0.0, 1.0]
        assert all(len(group.samples) == 2 for group in groups.values())

    run(work())


def test_a_killed_trainer_gets_what_it_did_not_acknowledge(tmp_path: Path) -> None:
    async def work() -> None:
        place = Place()
        async with Streams(tmp_path) as streams:
            source = streams.source(place, tasks(6))
            options = {"name": "run", "batch_size": 2, "rounds": 1, "zero_advantage": "keep"}
            async with streams.stream(source, **options) as stream:
                first, second = await stream.take(2)
                await stream.acknowledge(first)
                await stream.update_weights(1)
            async with streams.stream(source, **options) as stream:
                assert stream.statistics().version == 1
                groups = []
                while batch := await stream.take():
                    groups += batch
                    await stream.acknowledge()
                    await stream.update_weights(stream.version + 1)
            taken = ids(groups)
            assert sorted([*taken, first.task.id]) == [f"t{number}" for number in range(6)]
            again = next(group for group in groups if group.task.id == second.task.id)
            assert {each.record.rollout_id for each in again.rollouts} == {
                each.record.rollout_id for each in second.rollouts
            }
            assert all(group.staleness <= 1 for group in groups)

    run(work())


def test_a_stream_that_went_on_runs_no_finished_rollout_again(tmp_path: Path) -> None:
    async def work() -> None:
        place = Place()
        async with Streams(tmp_path) as streams:
            source = streams.source(place, tasks(2))
            for _ in range(2):
                async with streams.stream(source, name="run", batch_size=2, rounds=1) as stream:
                    await stream.take(2)
            with Store.open(tmp_path, read_only=True) as store:
                assert store.count() == 4

    run(work())


def test_a_stream_of_other_tasks_does_not_go_on(tmp_path: Path) -> None:
    async def work() -> None:
        async with Streams(tmp_path) as streams:
            async with streams.stream(streams.source(Place(), tasks(2)), name="run"):
                pass
            with pytest.raises(StoreError, match="was run with"):
                async with streams.stream(streams.source(Place(), tasks(3)), name="run"):
                    pass

    run(work())


def test_a_cancelled_caller_loses_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        place = Place()
        place.hold("t0")
        async with Streams(tmp_path) as streams, streams.stream(streams.source(place, tasks(1)), rounds=1) as stream:
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            place.release("t0")
            assert ids(await stream.take(1)) == ["t0"]

    run(work())


def test_a_batch_that_is_not_complete_in_time_comes_again(tmp_path: Path) -> None:
    async def work() -> None:
        place = Place()
        place.hold("t1")
        async with Streams(tmp_path) as streams:
            source = streams.source(place, tasks(2))
            async with streams.stream(source, batch_size=2, rounds=1, timeout=0.5) as stream:
                while not stream.statistics().ready:
                    await asyncio.sleep(0.01)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(stream.take(), 0.2)
                with pytest.raises(StreamError, match="nothing to train on"):
                    await stream.take()
                statistics = stream.statistics()
                assert (statistics.ready, statistics.delivered, statistics.unacknowledged) == (1, 0, 0)
                assert statistics.staleness == {}
                place.release("t1")
                assert sorted(ids(await stream.take())) == ["t0", "t1"]

    run(work())


def test_leaving_the_stream_while_a_group_is_written_logs_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with (
            Streams(tmp_path) as streams,
            streams.stream(streams.source(Place(), tasks(4)), max_staleness=None) as stream,
        ):
            held = threading.Event()
            waiting = asyncio.create_task(stream._worker.run(held.wait))
            reporting = asyncio.create_task(stream.report(loss=1.0))
            await asyncio.sleep(0)
            reporting.cancel()
            threading.Timer(0.1, held.set).start()
        await asyncio.gather(waiting, reporting, return_exceptions=True)
        assert read_training(tmp_path, stream.name).versions[0].reported == {"loss": 1.0}

    run(work())
    assert "failed after the caller had left" not in caplog.text


def test_leaving_the_stream_cancels_what_runs(tmp_path: Path) -> None:
    async def work() -> None:
        place = Place()
        place.hold("t0", "t1")
        async with Streams(tmp_path) as streams:
            async with streams.stream(streams.source(place, tasks(2))):
                while len(place.started) < 4:
                    await asyncio.sleep(0.01)
            with Store.open(tmp_path, read_only=True) as store:
                assert {record.outcome for record in store.list()} == {"cancelled"}

    run(work())


def test_a_stream_without_rewards_fails_with_the_reason(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            Streams(tmp_path) as streams,
            streams.stream(streams.source(Place(lambda *_: None), tasks(2)), max_failures=4) as stream,
        ):
            with pytest.raises(StreamError, match=r"in a row.*nobody knows"):
                await anext(stream)

    run(work())


def test_a_trainer_that_takes_too_much_is_told_after_the_timeout(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            Streams(tmp_path) as streams,
            streams.stream(streams.source(Place(), tasks(2)), max_staleness=0) as stream,
        ):
            await stream.take(1)
            stream.config = replace(stream.config, timeout=0.2)
            with pytest.raises(StreamError, match="nothing to train on") as caught:
                await anext(stream)
            assert "batch_size=1" in str(caught.value.hint)

    run(work())


def test_a_trainer_that_waits_in_vain_is_told_what_was_left_out(tmp_path: Path) -> None:
    async def work() -> None:
        place = Place(lambda *_: 1.0)
        async with (
            Streams(tmp_path) as streams,
            streams.stream(streams.source(place, tasks(2)), timeout=1.0) as stream,
        ):
            with pytest.raises(StreamError, match=r"rollouts were left out \(\d+ zero advantage\)"):
                await anext(stream)

    run(work())


@pytest.mark.parametrize("sources", [None, "fix-test", tasks(1), {"model": "demo"}], ids=str)
def test_what_is_no_source_is_refused(sources: Any) -> None:
    with pytest.raises(ConfigError, match="is not a Source"):
        Stream(sources)


@pytest.mark.parametrize("config", [RunConfig(model="demo"), {"batch_size": 2}], ids=str)
def test_a_stream_takes_a_stream_config(config: Any) -> None:
    with pytest.raises(ConfigError, match="the config of a stream has the type"):
        Stream([], config)


@pytest.mark.parametrize("wrong", [{"batch_size": "2"}, {"timeout": "5"}, {"rounds": True}], ids=str)
def test_a_setting_of_another_type_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} has a value of type"):
        StreamConfig(**wrong)
    with pytest.raises(ConfigError, match="config has a value of type dict"):
        Source(config={"model": "demo"})  # type: ignore[arg-type]


def test_a_source_needs_tasks_and_a_name_of_its_own(tmp_path: Path) -> None:
    async def work() -> None:
        async with Streams(tmp_path) as streams:
            for sources in ([streams.source(Place(), [])], [streams.source(Place(), tasks(1))] * 2):
                with pytest.raises(ConfigError):
                    async with streams.stream(*sources):
                        pass

    run(work())
