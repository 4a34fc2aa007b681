"""Figures of a stream: what the page and the example show."""

from pathlib import Path

import pytest

from paddock.errors import StoreError
from paddock.train.stream_state import StreamState, StreamUnit, UnitRollout
from paddock.train.training_view import MeanReward, list_streams, read_training


def rollout(name: str, reward: float | None, left_out: str | None = None, version: int = 0) -> UnitRollout:
    return UnitRollout(name, reward, left_out, version, version, 1, 100, -50.0, 2.0)


def write(folder: Path) -> StreamState:
    """Version 0 is worth 0.5 and leaves one of four out, version 1 is worth 1."""
    state = StreamState(folder, "run")
    state.open({}, 0)
    for number, version in enumerate((0, 1)):
        state.start(StreamUnit(number, "games", number, f"task-{number}", f"run.games.{number}"), version)
        rollouts = [rollout(f"r{number}-{member}", 1.0, version=version) for member in range(3)]
        if version == 0:
            rollouts = [*rollouts[:1], rollout("a", 0.0), rollout("b", None, "unscored: model"), rollout("c", 0.5)]
        state.finish(number, "ready", (version, version), rollouts)
        state.deliver(number, 1, 1 - version)
        state.acknowledge([number])
        state.report(version, {"entropy": 0.9 - version / 10})
        state.set_version(version + 1)
    return state


def test_rewards_are_by_the_version_that_sampled(tmp_path: Path) -> None:
    write(tmp_path).close()
    view = read_training(tmp_path, "run")
    first, second = view.versions[0], view.versions[1]
    assert (first.reward.count, first.reward.mean, second.reward.mean) == (3, 0.5, 1.0)
    assert first.reward.low is not None
    assert first.reward.high is not None
    assert first.reward.low < 0.5 < first.reward.high
    assert (second.reward.low, second.reward.high) == (1.0, 1.0)
    assert view.sources["games"][1].mean == 1.0
    assert {each.task_id: each.reward.mean for each in view.tasks} == {"task-0": 0.5, "task-1": 1.0}


def test_what_was_left_out_and_reported_is_by_version(tmp_path: Path) -> None:
    write(tmp_path).close()
    first, second = read_training(tmp_path, "run").versions[:2]
    assert (first.rollouts, first.left_out, second.left_out) == (4, {"unscored: model": 1}, {})
    assert (first.entropy, first.reported) == (0.5, {"entropy": 0.9})
    assert (second.staleness_mean, second.staleness_max) == (0.5, 1)
    assert first.staleness_max is None
    assert first.tokens_per_second is not None


def test_the_time_of_weights_that_a_trainer_goes_on_with_is_theirs(tmp_path: Path) -> None:
    write(tmp_path).close()
    state = StreamState(tmp_path, "run")
    state.open({}, 9)
    state.report(9, {"loss": 1.0})
    state.set_version(10)
    state.close()
    seconds = {each.version: each.seconds for each in read_training(tmp_path, "run").versions}
    assert seconds[9] is not None


def test_streams_are_listed(tmp_path: Path) -> None:
    assert list_streams(tmp_path) == []
    write(tmp_path).close()
    assert [(each["name"], each["version"], each["units"]) for each in list_streams(tmp_path)] == [("run", 2, 2)]
    with pytest.raises(StoreError, match="no stream 'other'"):
        read_training(tmp_path, "other")


def test_one_or_two_values_have_no_interval() -> None:
    assert MeanReward.of(1, 0.5, 0.25) == MeanReward(1, 0.5)
    assert MeanReward.of(2, 1.0, 1.0) == MeanReward(2, 0.5)
    assert MeanReward.of(0, None, None) == MeanReward(0)
