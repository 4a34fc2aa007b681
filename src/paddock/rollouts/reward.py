"""Read what a verifier wrote: reward.txt, reward.json. Knows nothing of sandboxes or files."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from paddock.rollouts.outcome import Reward

LARGEST_TEXT = 4096
LARGEST_JSON = 64 * 1024
VALUE_KEYS = ("reward", "score", "total")
PARTS_KEY = "parts"
NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def parse_reward(text: bytes | None, json_text: bytes | None) -> Reward:
    """The reward in `reward.txt` and `reward.json`; None stands for a file that is not there.

    reward.txt holds one finite number. reward.json holds an object of named numbers. Its value is
    the number under `reward`, else `score`, else `total`; without any of them, its only number. The
    other numbers, and those in an object under `parts`, are parts. Several numbers and no `reward` is
    unknown, as it is in Harbor: how to weigh them is the task's business, and a guess would train on
    the wrong thing. Texts, lists, true and false are no numbers and are passed over.

    With both files, reward.txt decides the value and reward.json gives the parts; a broken
    reward.json then costs only the parts. A broken reward.txt is unknown, whatever reward.json says.
    Two different rewards are unknown: tests write one, so somebody else may have written the other.
    """
    if text is None and json_text is None:
        return Reward.unknown("the verifier wrote no reward")
    if text is None:
        assert json_text is not None
        return _from_json(json_text)
    value = _from_text(text)
    named, parts = None, {}
    if json_text is not None:
        beside = _from_json(json_text, named_only=True)
        named, parts = beside.value, beside.parts
    if isinstance(value, float) and named is not None and named != value:
        value = f"reward.txt says {value:g}, but reward.json says {named:g}"
    return Reward(None, value, parts) if isinstance(value, str) else Reward(value, None, parts)


def _from_text(text: bytes) -> float | str:
    """The number, or the reason why there is none."""
    if len(text) > LARGEST_TEXT:
        return f"reward.txt has {len(text)} bytes, not one number"
    content = text.decode("utf-8", "replace").strip()
    if not content:
        return "reward.txt is empty"
    if content.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return f"reward.txt says {content}, which is not finite"
    if not NUMBER.fullmatch(content):
        return f"reward.txt is not one number: {content[:80]!r}"
    value = float(content)
    return value if math.isfinite(value) else f"reward.txt says {content[:80]}, which is not finite"


def _from_json(text: bytes, *, named_only: bool = False) -> Reward:
    """With `named_only`, a single number is a part unless it is called the reward."""
    if len(text) > LARGEST_JSON:
        return Reward.unknown(f"reward.json has {len(text)} bytes, over {LARGEST_JSON}")
    try:
        data = json.loads(text, parse_int=float)
    except (ValueError, RecursionError) as error:
        return Reward.unknown(f"reward.json is not valid JSON: {error}")
    if not isinstance(data, dict):
        return Reward.unknown('reward.json is not an object such as {"reward": 1.0}')
    named = data.get(PARTS_KEY)
    inner = named if isinstance(named, dict) else {}
    bad = [
        str(key) for key, value in (*data.items(), *inner.items()) if _is_number(value) and not math.isfinite(value)
    ]
    if bad:
        return Reward.unknown(f"reward.json has numbers that are not finite: {', '.join(bad)[:200]}")
    numbers = {str(key): float(value) for key, value in data.items() if _is_number(value)}
    parts = {str(key): float(value) for key, value in inner.items() if _is_number(value)}
    for key in VALUE_KEYS:
        if key in numbers:
            value = numbers.pop(key)
            return Reward(value, None, {**numbers, **parts})
        if key in data:
            return Reward(None, f"reward.json has no number under {key!r}", {**numbers, **parts})
    every = {**numbers, **parts}
    if len(every) == 1 and not named_only:
        return Reward(next(iter(every.values())), None, every)
    if not every:
        return Reward.unknown("reward.json holds no number")
    return Reward(None, f"reward.json has several numbers and none is 'reward': {', '.join(every)[:200]}", every)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
