"""OpenEnv's hooks that transform and score observations, under OpenEnv's names. A mixin of `Environment`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Rubrics:
    """Calls the `transform` and the `rubric` that an environment was made with. Without one, nothing changes."""

    transform: Callable[[Any], Any] | None = None
    rubric: Any = None

    def _apply_transform(self, observation: Any) -> Any:
        return observation if self.transform is None else self.transform(observation)

    def _apply_rubric(self, action: Any, observation: Any) -> Any:
        """The score of a rubric that is not async; 0.0 without one."""
        return 0.0 if self.rubric is None else self.rubric(action, observation)

    async def _apply_rubric_async(self, action: Any, observation: Any) -> Any:
        score = self._apply_rubric(action, observation)
        return await score if inspect.isawaitable(score) else score

    def _reset_rubric(self) -> None:
        if hasattr(self.rubric, "reset"):
            self.rubric.reset()

    async def _reset_rubric_async(self) -> None:
        if hasattr(self.rubric, "reset_async"):
            await self.rubric.reset_async()
        else:
            self._reset_rubric()
