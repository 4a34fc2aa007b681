"""Two environments: find a hidden number, and name the number after another.

`paddock serve examples/grpo_tiny/game.py:Game` serves the first, `…:After` the second.
"""

from __future__ import annotations

import random

from paddock import Observation, ToolEnvironment, tool
from paddock.env import ToolReturn

LARGEST = 7
GUESSES = 3
"""Enough to find any of the numbers, for whoever halves what is left with each guess."""
PROMPT = f"find a number from 1 to {LARGEST}"


def after_prompt(seed: int) -> str:
    return f"name the number after {first_number(seed)}"


def first_number(seed: int) -> int:
    return 1 + seed % LARGEST


class Game(ToolEnvironment):
    """A hidden number and a few guesses. Finding it is worth 1, running out of guesses 0."""

    concurrent_sessions = True
    inline = True

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        drawn = random.randrange(LARGEST) if seed is None else seed % LARGEST
        self._hidden = 1 + drawn
        self._left = GUESSES
        return Observation()

    @tool
    def guess(self, number: int) -> ToolReturn:
        """Guess the hidden number.

        Args:
            number: The guess.
        """
        self._left -= 1
        if number == self._hidden:
            return ToolReturn("found", reward=1.0, done=True)
        return ToolReturn("higher" if number < self._hidden else "lower", reward=0.0, done=self._left == 0)


class After(ToolEnvironment):
    """One pick. The number after the one of the prompt is worth 1, any other 0."""

    concurrent_sessions = True
    inline = True

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        self._right = first_number(random.randrange(LARGEST) if seed is None else seed) + 1
        return Observation()

    @tool
    def pick(self, number: int) -> ToolReturn:
        """Pick a number.

        Args:
            number: The pick.
        """
        is_right = number == self._right
        return ToolReturn("right" if is_right else "wrong", reward=float(is_right), done=True)
