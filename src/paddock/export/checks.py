"""Checks that forms share: lengths, masks, token ids, logprobs and rewards. Each yields the problems it finds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

UNSCORED = "it has no reward"


def equal_lengths(document: dict[str, Any], *names: str) -> Iterator[str]:
    lengths = {name: len(document[name]) for name in names}
    if len(set(lengths.values())) > 1:
        yield "lengths differ: " + ", ".join(f"{name} {length}" for name, length in lengths.items())


def token_ids(ids: Sequence[int], name: str) -> Iterator[str]:
    if not ids:
        yield f"{name} is empty"
    if not set(map(type, ids)) <= {int} or (ids and min(ids) < 0):
        yield f"{name} holds something that is no token id"


def mask(values: Sequence[int | bool], name: str) -> Iterator[str]:
    if not set(values) <= {0, 1}:
        yield f"{name} holds something else than 0 and 1"
    elif not any(values):
        yield f"{name} lets nothing be trained on"


def logprobs(values: Sequence[float], name: str) -> Iterator[str]:
    if not all(map(math.isfinite, values)):
        yield f"{name} holds a value that is not finite"
    elif values and max(values) > 1e-3:
        yield f"{name} holds {max(values):g}, and no probability is above 1"


def masked_logprobs(values: Sequence[float], mask: Sequence[int | bool], name: str) -> Iterator[str]:
    """Where nothing was sampled there is no logprob."""
    if any(value and not sampled for value, sampled in zip(values, mask, strict=False)):
        yield f"{name} is not 0 where the mask is"


def training_sequence(
    document: dict[str, Any], *, ids: Sequence[str], aligned: Sequence[str], mask_name: str, logprobs_name: str
) -> Iterator[str]:
    """A sequence of tokens with a mask and logprobs. `ids` and `aligned` name columns; `aligned` have one length."""
    for name in ids:
        yield from token_ids(document[name], name)
    yield from equal_lengths(document, *aligned)
    yield from mask(document[mask_name], mask_name)
    yield from logprobs(document[logprobs_name], logprobs_name)
    yield from masked_logprobs(document[logprobs_name], document[mask_name], logprobs_name)


def reward(value: Any) -> Iterator[str]:
    if value is None:
        yield UNSCORED
    elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        yield f"the reward {value!r} is no finite number"
