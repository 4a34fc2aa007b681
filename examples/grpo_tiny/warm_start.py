"""A short supervised start: the policy learns how a call is written, from games that are played blindly.

It imitates a player who guesses at random and ignores every hint and every prompt, so it knows the words and nothing
of the games.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import game
import torch
import words

if TYPE_CHECKING:
    from policy import Policy

STEPS = 80
ROWS = 32


def blind_game(chance: random.Random) -> tuple[list[int], list[int]]:
    """The tokens of a game, and 1 for those that the player wrote."""
    if chance.random() < 0.5:
        return blind_pick(chance)
    hidden = chance.randint(1, game.LARGEST)
    ids = words.encode(f"{game.PROMPT}\n>")
    own = [0] * len(ids)
    for _ in range(game.GUESSES):
        number = chance.randint(1, game.LARGEST)
        guess = words.call_ids("guess", number)
        reply = words.encode(f"{'higher' if number < hidden else 'lower'}\n>")
        ids, own = ids + guess + reply, own + [1] * len(guess) + [0] * len(reply)
        if number == hidden:
            break
    return ids, own


def blind_pick(chance: random.Random) -> tuple[list[int], list[int]]:
    prompt = words.encode(f"{game.after_prompt(chance.randrange(game.LARGEST))}\n>")
    pick = words.call_ids("pick", chance.randint(1, game.LARGEST + 1))
    return prompt + pick, [0] * len(prompt) + [1] * len(pick)


def warm_start(policy: Policy, seed: int) -> float:
    """Train on blind games; returns the last loss."""
    chance = random.Random(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    loss = torch.zeros(())
    for _ in range(STEPS):
        games = [blind_game(chance) for _ in range(ROWS)]
        longest = max(len(ids) for ids, _ in games)
        mask = torch.tensor([own[1:] + [0] * (longest - len(own)) for _, own in games])
        loss = -(policy.logprobs([ids for ids, _ in games]) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())
