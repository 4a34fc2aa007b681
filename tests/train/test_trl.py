"""The TRL integrations, as far as they need no TRL: episodes behind methods, and the columns of rollouts."""

import asyncio
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

from paddock import Action, Environment, Observation, State, ToolEnvironment, tool
from paddock.env import ToolReturn
from paddock.errors import ConfigError, PaddockError, RolloutError, ToolFailure
from paddock.export.samples import Sample
from paddock.models import Endpoint
from paddock.rollouts import Task
from paddock.rollouts.loop import ToolSession
from paddock.rollouts.loop.environment import EnvironmentSession
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.train.episode import EPISODE_OVER, EnvironmentHandle, derive_seed
from paddock.train.prompt_rollouts import PromptRollouts, make_prompt_task
from paddock.train.sampled import SampledRollout
from paddock.train.stream_config import StreamConfig
from paddock.train.trl import RolloutWorker, TrlEnvironment, columns, environment_factory, reward


class Door(ToolEnvironment):
    """Opens when it is pushed, if the seed is even."""

    concurrent_sessions = True

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        self.seed = seed
        return Observation()

    @tool
    def push(self, force: int) -> ToolReturn:
        """Push the door.

        Args:
            force: How hard.
        """
        opens = force > 1 and (self.seed or 0) % 2 == 0
        return ToolReturn("it opens" if opens else "nothing", reward=1.0 if opens else 0.0, done=opens)

    @tool
    def look(self) -> str:
        """Look at the door."""
        return f"a door, number {self.seed}"

    @tool
    def kick(self) -> str:
        """Kick it."""
        raise ValueError("it hurts")


class Add(Action):
    amount: int


class Total(Observation):
    total: int = 0


class Sum(Environment[Add, Total, State]):
    """Adds up."""

    def reset(self, *, seed: int | None = None, episode_id: str | None = None, start: int = 0) -> Total:
        self.total = start
        return Total(total=self.total)

    def step(self, action: Add) -> Total:
        self.total += action.amount
        return Total(total=self.total, reward=float(action.amount))


@pytest.fixture
def door() -> Iterator[Any]:
    made = environment_factory(Door)
    yield made()
    made._environment.close()


def test_methods_play_an_episode_to_its_reward(door: Any) -> None:
    assert door.reset(prompt="open it", seed=2) is None
    assert door.look() == "a door, number 2"
    assert door.push(force=1) == "nothing"
    assert door.push(force=2) == "it opens"
    assert door.get_reward() == 1.0


def test_nothing_happens_after_the_end_of_an_episode(door: Any) -> None:
    door.reset(seed=2)
    door.push(force=2)
    assert door.push(force=2) == EPISODE_OVER
    assert door.get_reward() == 1.0


def test_an_instance_is_used_again_from_the_start(door: Any) -> None:
    door.reset(seed=2)
    door.push(force=2)
    door.reset(seed=3)
    assert door.get_reward() is None
    assert door.push(force=2) == "nothing"
    assert door.get_reward() == 0.0


def test_what_a_model_did_wrong_is_raised_and_the_episode_goes_on(door: Any) -> None:
    door.reset(seed=2)
    with pytest.raises(ToolFailure, match="it hurts"):
        door.kick()
    with pytest.raises(ToolFailure, match="force"):
        door.push(force="hard")
    door.push(force=2)
    assert door.get_reward() == 1.0


def test_an_episode_without_a_reward_is_worth_what_the_author_says() -> None:
    made = environment_factory(Door, silent=-0.5, name="Gate")
    instance = made()
    instance.reset(seed=1)
    assert made.__name__ == "Gate"
    assert instance.get_reward() == -0.5
    made._environment.close()


def test_only_tools_are_public(door: Any) -> None:
    public = [name for name in dir(door) if not name.startswith("_")]
    assert sorted(public) == ["get_reward", "kick", "look", "push", "reset"]


def test_an_environment_without_tools_has_one_for_its_action() -> None:
    made: Any = environment_factory(Sum)
    instance = made()
    visible = instance.reset(prompt=[{"role": "user", "content": "add"}], start=4, other=1)
    assert visible == '\n\nThe environment shows:\n{"total":4}'
    assert '"total":7' in instance.act(amount=3)
    assert instance.get_reward() == 3.0
    made._environment.close()


def test_the_class_is_made_again_from_a_pickle() -> None:
    made = environment_factory(Door, silent=0.0)
    again = pickle.loads(pickle.dumps(made))
    assert again is not made
    assert again.__name__ == made.__name__
    assert again._silent == 0.0
    assert pickle.loads(pickle.dumps(TrlEnvironment)) is TrlEnvironment
    for each in (made, again):
        each._environment.close()


def test_a_target_is_named_as_for_serve() -> None:
    place = EnvironmentHandle("echo")
    assert "echo_message" in [tool.name for tool in place.tools]
    place.close()


def test_the_same_row_has_the_same_seed() -> None:
    row = {"prompt": [{"role": "user", "content": "go"}]}
    assert derive_seed(row) == derive_seed(dict(row)) != derive_seed({**row, "level": 2})
    assert derive_seed({"prompt": [{"role": "user", "content": ""}]}) is None


# -- rollouts ----------------------------------------------------------------------------------------------------


def sample(mask: list[int], value: float | None = 1.0) -> Sample:
    return Sample(
        rollout_id="r1",
        task_id="t",
        group_id="b/t",
        outcome="ok",
        reward=value,
        reward_parts={},
        branch=0,
        is_last=True,
        calls=("c0",),
        label="main",
        prompt_ids=[5, 6],
        response_ids=list(range(10, 10 + len(mask))),
        mask=mask,
        logprobs=[-0.5 * each for each in mask],
        weight_versions=("1",),
        finish_reason="stop",
    )


def rolled(*samples: Sample, outcome: Outcome = Outcome.OK) -> SampledRollout:
    return SampledRollout(RolloutRecord("r1", "t", outcome=outcome), [], list(samples))


def test_the_sequence_with_most_trained_tokens_goes_to_trl() -> None:
    values = columns([rolled(sample([1]), sample([1, 0, 1]))], filler=0)
    assert values["completion_ids"] == [[10, 11, 12]]
    assert values["env_mask"] == [[1, 0, 1]]
    assert values["logprobs"] == [[-0.5, 0.0, -0.5]]
    assert values["left_out"] == [1]


def test_a_rollout_that_gave_nothing_is_masked_and_has_no_reward() -> None:
    values = columns([rolled(outcome=Outcome.MODEL), rolled(sample([1]))], filler=9)
    assert (values["prompt_ids"][0], values["completion_ids"][0], values["env_mask"][0]) == ([9], [9], [0])
    assert reward(prompts=[], **values) == [None, 1.0]
    assert values["outcome"] == ["model", "ok"]


def test_a_prompt_is_a_task() -> None:
    conversation = [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "go"}]}]
    assert make_prompt_task("go").instruction == make_prompt_task(conversation).instruction == "go"


def test_an_agent_does_not_work_in_an_environment() -> None:
    with pytest.raises(ConfigError, match="sandbox"):
        PromptRollouts("http://127.0.0.1:1", environment="http://127.0.0.1:2", agent="opencode")


def test_a_group_of_one_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match="1 generations"):
        RolloutWorker(["go"], "http://127.0.0.1:1", num_generations=1)


def test_a_worker_delivers_groups() -> None:
    with pytest.raises(ConfigError, match="deliver is 'rollout'"):
        RolloutWorker(["go"], "http://127.0.0.1:1", config=StreamConfig(deliver="rollout"))


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    worker = RolloutWorker(["go"], "nonsense", environment=Door, store=tmp_path)
    with pytest.raises(PaddockError, match="nonsense"):
        worker.start()
    with pytest.raises(RolloutError, match="stopped"):
        worker.check_health(60.0)
    worker.stop()


def test_stopping_a_worker_cuts_off_what_runs(tmp_path: Path) -> None:
    begun = threading.Event()

    class Endless(EnvironmentSession):
        async def open(self) -> None:
            begun.set()
            await asyncio.sleep(3600)

    def session(task: Task) -> ToolSession:
        return Endless(Door, task.instruction)

    worker = RolloutWorker(["go"], Endpoint("http://127.0.0.1:1/v1", "m"), environment=session, store=tmp_path)
    worker.start()
    assert begun.wait(30)
    worker.check_health(60.0)
    with pytest.raises(Empty):
        worker.rollout_buffer.get_nowait()
    worker.stop()
    with Store.open(tmp_path, read_only=True) as store:
        assert {record.outcome for record in store.list()} == {"cancelled"}
