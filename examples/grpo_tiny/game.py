"""The environment: find a number by guessing. `paddock serve examples/grpo_tiny/game.py:Game` serves it."""

from __future__ import annotations

import random

from paddock import Observation, ToolEnvironment, tool
from paddock.env import ToolReturn

LARGEST = 7
GUESSES = 3
"""Enough to find any of the numbers, for whoever halves what is left with each guess."""
PROMPT = f"find a number from 1 to {LARGEST}"


class Game(ToolEnvironment):
    """A hidden number and a few guesses. Finding it is worth 1, running out of guesses 0."""

    concurrent_sessions = True
    inline = True

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        drawn = random.randrange(LARGEST) if seed is None else seed % LARGEST
        self._hidden = 1 + drawn
        self._guesses_left = GUESSES
        return Observation()

    @tool
    def guess(self, number: int) -> ToolReturn:
        """Guess the hidden number.

        Args:
            number: The guess.
        """
        self._guesses_left -= 1
        if number == self._hidden:
            return ToolReturn("found", reward=1.0, done=True)
        return ToolReturn("higher" if number < self._hidden else "lower", reward=0.0, done=self._guesses_left == 0)
