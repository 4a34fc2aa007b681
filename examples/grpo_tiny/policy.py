"""The policy: a transformer of some hundred thousand weights, made from nothing. Knows tokens and no text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import words
from torch import Tensor, nn
from torch.nn import functional as F

CONTEXT = 64


class Block(nn.Module):  # type: ignore[misc]
    """Attention and a small network behind it, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.gather = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, length, width = x.shape
        parts = self.gather(self.before_attention(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        keys_and_values = torch.stack((key, value))
        if past is not None:
            keys_and_values = torch.cat((past, keys_and_values), dim=3)
        scores = query @ keys_and_values[0].transpose(-1, -2) / math.sqrt(width // self.heads)
        weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        x = x + self.mix((weights @ keys_and_values[1]).transpose(1, 2).reshape(rows, length, width))
        return x + self.network(self.before_network(x)), keys_and_values


class Policy(nn.Module):  # type: ignore[misc]
    """`version` counts the updates. `forward` gives the logits of the next token at every place."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.version = 0
        self.tokens = nn.Embedding(len(words.NAMES), width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(words.NAMES), bias=False)

    def forward(self, tokens: Tensor, real: Tensor, past: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """`real` says which of the past and present places hold a token, and not padding."""
        new, whole = tokens.shape[1], real.shape[1]
        places = (real.cumsum(1) - 1).clamp(min=0)[:, whole - new :]
        earlier = torch.ones(whole, whole, dtype=torch.bool).tril()[whole - new :]
        # A row of padding sees itself, for a softmax over nothing has no value.
        itself = torch.eye(whole, dtype=torch.bool)[whole - new :]
        mask = (earlier & real[:, None, :].bool()) | itself
        x = self.tokens(tokens) + self.places(places)
        cache = []
        for number, block in enumerate(self.blocks):
            x, keys_and_values = block(x, mask, None if past is None else past[number])
            cache.append(keys_and_values)
        return self.head(self.last(x)), cache

    def logprobs(self, sequences: list[list[int]]) -> Tensor:
        """The logprob of every token but the first, given all before it; rows are padded on the right."""
        longest = max(len(ids) for ids in sequences)
        tokens = torch.tensor([ids + [words.PAD] * (longest - len(ids)) for ids in sequences])
        real = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences])
        logits, _ = self(tokens[:, :-1], real[:, :-1])
        token_logprobs: Tensor = F.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return token_logprobs


@dataclass(slots=True)
class Sampled:
    """An answer, while it is sampled and afterwards."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, token: int, logprob: float, limit: int) -> None:
        """One more token, unless the answer has ended."""
        if self.finish_reason is None:
            self.ids.append(token)
            self.logprobs.append(logprob)
            if token == words.END:
                self.finish_reason = "stop"
            elif len(self.ids) >= limit:
                self.finish_reason = "length"


class Sampler:
    """Samples from the policy's own distribution, many answers at once."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self._policy = policy
        self._generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def __call__(self, prompts: list[list[int]], limits: list[int]) -> tuple[list[Sampled], int]:
        """An answer to each prompt, and the version of the weights."""
        version = self._policy.version
        longest = max(len(ids) for ids in prompts)
        tokens = torch.tensor([[words.PAD] * (longest - len(ids)) + ids for ids in prompts])
        real = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        past: list[Tensor] | None = None
        answers = [Sampled() for _ in prompts]
        while any(answer.finish_reason is None for answer in answers):
            logits, past = self._policy(tokens, real, past)
            logprobs = F.log_softmax(logits[:, -1], -1)
            tokens = torch.multinomial(logprobs.exp(), 1, generator=self._generator)
            sampled_logprobs = logprobs.gather(-1, tokens)
            for row, answer in enumerate(answers):
                answer.add(int(tokens[row]), float(sampled_logprobs[row]), limits[row])
            real = torch.cat((real, torch.ones_like(tokens)), dim=1)
        return answers, version
