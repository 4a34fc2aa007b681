"""Numbers that JSON cannot express: NaN and the infinities.

The rule: such a number is never replaced by null where a program acts on it. In an action, in arguments and in a
reward it is refused with an error that names the field. Clients refuse it before they send, and servers before they
execute, whether it came as `NaN`, `Infinity`, `1e999` or as text for a float field. In an observation, a state or the
value of a tool it stays what OpenEnv makes of it, null: there it says that a value is unknown.
"""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from paddock.errors import EnvironmentFailure, InvalidMessage

if TYPE_CHECKING:
    from collections.abc import Iterable

FINITE = frozenset((str, int, bool, type(None), bytes))
PLAIN = frozenset((float, dict, list, tuple))
NOT_A_MODEL = object()
MESSAGE = "Input should be a finite number, not NaN or infinity"


def find_nonfinite(value: Any) -> list[Any] | None:
    """The location of the first number in `value` that is not finite, as keys and indices; None if all are finite."""
    kind = type(value)
    if kind in FINITE:
        return None
    if kind is float:
        return None if isfinite(value) else []
    members: Iterable[tuple[Any, Any]]
    extra: Any = getattr(value, "__pydantic_extra__", NOT_A_MODEL)
    if extra is not NOT_A_MODEL:
        # A model. `isinstance` would take longer than all the rest: this is on the path of every step.
        members = value.__dict__.items() if not extra else [*value.__dict__.items(), *extra.items()]
    elif isinstance(value, dict):
        members = value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        if _all_finite(value):
            return None
        members = enumerate(value)
    elif hasattr(value, "dtype"):
        return _find_in_array(value)
    elif is_dataclass(value) and not isinstance(value, type):
        members = ((field.name, getattr(value, field.name)) for field in fields(value))
    else:
        return [] if isinstance(value, float) and not isfinite(value) else None
    for name, member in members:
        # Empty containers and zero are finite. NaN is truthy.
        kind = type(member)
        if kind in FINITE or (kind in PLAIN and not member):
            continue
        if (location := find_nonfinite(member)) is not None:
            return [name, *location]
    return None


def check_finite(value: Any, *prefix: Any) -> None:
    """Raise InvalidMessage if a number in `value` is not finite; `prefix` is the location of `value` itself."""
    location = find_nonfinite(value)
    if location is not None:
        raise InvalidMessage("Invalid message", errors=[problem_at([*prefix, *location])])


def problem_at(location: list[Any]) -> dict[str, Any]:
    """The entry of an error list for a number that is not finite. JSON cannot express it, so `input` is null."""
    return {"type": "finite_number", "loc": location, "msg": MESSAGE, "input": None}


def check_reward(reward: Any) -> Any:
    """The reward of an environment. Raises EnvironmentFailure if it is NaN or infinite."""
    if type(reward) in FINITE:
        return reward
    try:
        if isfinite(reward):
            return reward
    except (TypeError, ValueError, OverflowError):
        return reward
    raise EnvironmentFailure(
        f"the environment returned a reward that is {float(reward)}",
        hint="return a finite number, or None if the step has no score",
    )


def _all_finite(values: Iterable[Any]) -> bool:
    """Whether all are finite numbers. If they are not all numbers, the caller checks each one."""
    try:
        return all(map(isfinite, values))
    except (TypeError, ValueError, OverflowError):
        return False


def _find_in_array(array: Any) -> list[Any] | None:
    """`find_nonfinite` for a numpy array or number."""
    numpy = sys.modules["numpy"]
    if array.dtype.kind not in "fc":
        return find_nonfinite(array.tolist()) if array.dtype.kind == "O" else None
    indices = numpy.argwhere(~numpy.isfinite(array))
    return [int(index) for index in indices[0]] if len(indices) else None
