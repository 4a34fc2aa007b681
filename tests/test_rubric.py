"""Scores and transforms, under the names that OpenEnv's authors know."""

from typing import Any

import pytest

from environments import Add, Total
from paddock import Environment, State


class Half:
    """A rubric."""

    resets = 0

    def __call__(self, action: Add, observation: Total) -> float:
        return action.amount / 2

    def reset(self) -> None:
        self.resets += 1


class AsyncHalf:
    resets = 0

    async def __call__(self, action: Add, observation: Total) -> float:
        return action.amount / 2

    async def reset_async(self) -> None:
        self.resets += 1


class Scored(Environment[Add, Total, State]):
    def reset(self, **_: Any) -> Total:
        self._reset_rubric()
        return Total(total=0)

    def step(self, action: Add) -> Total:
        seen = Total(total=action.amount)
        seen.reward = self._apply_rubric(action, seen)
        return self._apply_transform(seen)  # type: ignore[no-any-return]


def doubled(seen: Total) -> Total:
    return seen.model_copy(update={"total": 2 * seen.total})


def test_a_step_is_scored_and_transformed() -> None:
    rubric = Half()
    environment = Scored(transform=doubled, rubric=rubric)
    environment.reset()
    seen = environment.step(Add(amount=3))
    assert (seen.total, seen.reward, rubric.resets) == (6, 1.5, 1)


def test_without_them_nothing_changes() -> None:
    environment = Scored()
    environment.reset()
    seen = environment.step(Add(amount=3))
    assert (seen.total, seen.reward) == (3, 0.0)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [Half, AsyncHalf])
async def test_async_environments_take_either_kind(kind: Any) -> None:
    environment = Scored(rubric=kind())
    await environment._reset_rubric_async()
    assert await environment._apply_rubric_async(Add(amount=3), Total(total=3)) == 1.5
    assert environment.rubric.resets == 1
