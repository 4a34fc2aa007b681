"""The environments that Paddock serves in the benchmarks, twins of those in `openenv_app.py`."""

from uuid import uuid4

from pydantic import Field

from bench.work import burn, sleep
from paddock import Action, Environment, Observation, State

EPISODE_TOTAL = 10


class Add(Action):
    amount: int = Field(ge=0)


class Total(Observation):
    total: int


class ThreadCounter(Environment[Add, Total, State]):
    """Adds up. Declares nothing about its cost, so its steps run on threads."""

    concurrent_sessions = True

    def __init__(self) -> None:
        super().__init__()
        self._total = 0
        self._state = State(episode_id=str(uuid4()))

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Total:
        self._total = 0
        self._state = State(episode_id=episode_id or str(uuid4()))
        return Total(total=0)

    def step(self, action: Add) -> Total:
        self._total += action.amount
        self._state.step_count += 1
        return Total(total=self._total, reward=action.amount, done=self._total >= EPISODE_TOTAL)

    @property
    def state(self) -> State:
        return self._state


class SleepCounter(ThreadCounter):
    """Waits 5 ms in every step."""

    def step(self, action: Add) -> Total:
        sleep()
        return super().step(action)


class BusyCounter(ThreadCounter):
    """Computes for about 200 us in every step."""

    def step(self, action: Add) -> Total:
        burn()
        return super().step(action)


class InlineBusyCounter(BusyCounter):
    """The same, declared cheap enough to run on the event loop."""

    inline = True
