"""`${NAME}` and `${NAME:-default}` in the variables of a task.

Harbor takes the value of NAME from the machine. A task is foreign text, so here it gets no variable of the machine:
the default counts, and a name without one is an error.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paddock.errors import TaskError

if TYPE_CHECKING:
    from collections.abc import Mapping

TEMPLATE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def expand_defaults(variables: Mapping[str, str], where: str) -> dict[str, str]:
    """The variables with their defaults in place. Raises TaskError for a name that has none."""
    return {name: _expand(text, f"{where}.{name}") for name, text in variables.items()}


def _expand(text: str, where: str) -> str:
    return TEMPLATE.sub(lambda match: _default(match, where), text)


def _default(match: re.Match[str], where: str) -> str:
    if match[2] is None:
        raise TaskError(
            f"{where} needs the variable {match[1]} of this machine, which tasks do not get",
            hint=f"give it a default: ${{{match[1]}:-…}}",
        )
    return match[2]
