"""Values that equal more than one thing, for the parts of an answer that may vary."""

import re
from typing import Any


class Some:
    """Equals every value of the type."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, self.kind)

    def __repr__(self) -> str:
        return f"Some({self.kind.__name__})"


class Matching:
    """Equals every text in which the pattern is found."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and re.search(self.pattern, other) is not None

    def __repr__(self) -> str:
        return f"Matching({self.pattern!r})"


class Including:
    """Equals every object that has at least these keys with these values."""

    def __init__(self, **required: Any) -> None:
        self.required = required

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and all(
            key in other and other[key] == value for key, value in self.required.items()
        )

    def __repr__(self) -> str:
        return f"Including({self.required!r})"


class Besides:
    """Equals this object, also when it has some of the optional keys besides. Null is an empty object."""

    def __init__(self, exact: dict[str, Any], *optional: str) -> None:
        self.exact = exact
        self.optional = optional

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, dict | None):
            return False
        return self.exact == {key: value for key, value in (other or {}).items() if key not in self.optional}

    def __repr__(self) -> str:
        return f"Besides({self.exact!r}, {self.optional})"
