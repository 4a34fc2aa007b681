"""A good environment of each kind, and each thing that an environment can get wrong, one per class."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import uuid
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from paddock import Action, Environment, Observation, State, ToolEnvironment, tool


class Add(Action):
    amount: int = Field(ge=0)


class Total(Observation):
    total: int


class TotalState(State):
    total: int = 0


class Good(Environment[Add, Total, TotalState]):
    """Adds up."""

    concurrent_sessions = True

    def __init__(self) -> None:
        super().__init__()
        self.now = TotalState()

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Any:
        self.now = TotalState(episode_id=episode_id or str(uuid.uuid4()))
        return Total(total=0)

    def step(self, action: Add) -> Any:
        self.now.step_count += 1
        self.now.total += action.amount
        return Total(total=self.now.total, reward=1.0)

    @property
    def state(self) -> Any:
        return self.now


class GoodTools(ToolEnvironment):
    """Says back what it is told."""

    concurrent_sessions = True

    @tool
    def say(self, text: str) -> str:
        """Say it back."""
        return text


class GoodAsync(Good):
    """Adds up, without a hurry."""

    async def step_async(self, action: Add) -> Any:
        await asyncio.sleep(0)
        return super().step(action)


class AloneOnly(Good):
    """Adds up, for one at a time."""

    concurrent_sessions = False


class WithoutSeed(Environment[Add, Total, State]):
    """Adds up, and knows no chance."""

    def reset(self) -> Total:  # type: ignore[override]
        return Total(total=0)

    def step(self, action: Add) -> Total:
        return Total(total=action.amount)


# -- what can go wrong --------------------------------------------------------------------------------


class CannotBeBuilt(Good):
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class HasNoStep:
    def reset(self) -> None: ...


class Thing:
    pass


class ThingObservation(Observation):
    thing: Thing


class CannotBeDescribed(Environment[Add, ThingObservation, State]):
    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> ThingObservation:
        return ThingObservation(thing=Thing())

    def step(self, action: Add) -> ThingObservation:
        return ThingObservation(thing=Thing())


class SaysNothingOfItself(Good):
    __doc__ = None

    def get_metadata(self) -> Any:
        described = super().get_metadata()
        return described.model_copy(update={"description": f"{described.name} environment"})


class ResetsToNothing(Good):
    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Any:
        return None


class ResetsToAnotherType(Good):
    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Any:
        return Observation()


class ResetsToABadDict(Good):
    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Any:
        return {"total": "many"}


class IgnoresTheSeed(Good):
    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Any:
        super().reset(episode_id=episode_id)
        return Total(total=random.randrange(10**9))


class Spell(Action):
    word: str = Field(pattern="^[xyz]{5}$")


class Unguessable(Good):
    action_type = Spell


class SaysNoActionType(Good):
    action_type = Action


class HasNoTools(ToolEnvironment):
    pass


class StepFails(Good):
    def step(self, action: Add) -> Any:
        raise ValueError("illegal move")


class StepHangs(Good):
    def step(self, action: Add) -> Any:
        threading.Event().wait(20)


class ToolFails(GoodTools):
    @tool
    def open_door(self, name: str) -> str:
        """Open a door."""
        raise KeyError(name)


class StepsToAnotherType(Good):
    def step(self, action: Add) -> Any:
        return Observation()


class RewardIsNaN(Good):
    def step(self, action: Add) -> Any:
        return Total(total=1, reward=float("nan"))


class RewardIsAWord(Good):
    def step(self, action: Add) -> Any:
        fields: dict[str, Any] = {"total": 1, "reward": "plenty", "done": False, "metadata": {}}
        return Total.model_construct(**fields)


class DoneIsANumber(Good):
    def step(self, action: Add) -> Any:
        fields: dict[str, Any] = {"total": 1, "reward": None, "done": 1, "metadata": {}}
        return Total.model_construct(**fields)


class Weight(Observation):
    weight: float


class ObservationLosesItsWeight(Environment[Add, Weight, State]):
    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Weight:
        return Weight(weight=1.0)

    def step(self, action: Add) -> Weight:
        return Weight(weight=float("nan"))


class ObservationCannotBeWritten(Good):
    def step(self, action: Add) -> Any:
        return Total(total=1, metadata={"thing": Thing()})


class StateCannotBeWritten(Good):
    @property
    def state(self) -> Any:
        return TotalState(thing=Thing())


class CountsNoSteps(Good):
    def step(self, action: Add) -> Any:
        return Total(total=1)


class StateHasNoEpisode(Good):
    state_type = dict

    @property
    def state(self) -> Any:
        return {"step_count": self.now.step_count}


class EpisodeHasNoName(Good):
    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Any:
        self.now = TotalState()
        return Total(total=0)


class StateChangesWhenRead(Good):
    @property
    def state(self) -> Any:
        self.now.total += 1
        return self.now


class NeverBeginsAnew(Good):
    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Any:
        self.now.episode_id = episode_id or str(uuid.uuid4())
        return Total(total=0)


class ForgetsTheEpisodeItIsGiven(Good):
    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Any:
        return super().reset()


class ToolWithoutDescription(GoodTools):
    @tool
    def jump(self, height: int) -> str:
        return "ouch"


class ToolWithoutTypes(GoodTools):
    @tool
    def jump(self, height) -> str:  # type: ignore[no-untyped-def]
        """Jump."""
        return "ouch"


class Anything(Action):
    amount: Annotated[int, BeforeValidator(lambda _: 0)] = 0


class TakesEveryAction(Good):
    action_type = Anything


class CloseNeedsAReset(Good):
    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Any:
        self.file = "open"
        return super().reset(episode_id=episode_id)

    def close(self) -> None:
        del self.file


class CloseFailsAfterAFailure(Good):
    broken = False

    def step(self, action: Add) -> Any:
        self.broken = True
        answer = super().step(action)
        self.broken = False
        return answer

    def close(self) -> None:
        if self.broken:
            raise RuntimeError("still holding the lock")


class SharesItsTotal(Good):
    everybodys: ClassVar[list[int]] = []

    def step(self, action: Add) -> Any:
        self.everybodys.append(action.amount)
        return super().step(action)

    @property
    def state(self) -> Any:
        return self.now.model_copy(update={"total": len(self.everybodys)})


class SharesItsSight(GoodTools):
    last: ClassVar[dict[str, int]] = {"sessions": 0}

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        SharesItsSight.last = {"heard": 0}
        return Observation()

    @tool
    def say(self, text: str) -> str:
        """Say it back."""
        self.last["heard"] += 1
        return f"{text} {self.last['heard']}"


class ClingsToItsThread(Good):
    def __init__(self) -> None:
        super().__init__()
        self.home = threading.get_ident()

    def step(self, action: Add) -> Any:
        if threading.get_ident() != self.home:
            raise RuntimeError("created in another thread")
        return super().step(action)


class SlowThoughInline(Good):
    inline = True

    def step(self, action: Add) -> Any:
        time.sleep(0.008)
        return super().step(action)


class BlocksTheLoop(Good):
    async def step_async(self, action: Add) -> Any:
        time.sleep(0.12)  # noqa: ASYNC251
        return super().step(action)


class MoreThanTotal(Total):
    surplus: int = 0


class ReturnsMoreThanItDeclares(Good):
    def step(self, action: Add) -> Any:
        super().step(action)
        return MoreThanTotal(total=1, surplus=2)
