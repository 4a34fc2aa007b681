"""Variables and quotes in the arguments of instructions, as Docker expands them: `$x ${x} ${x:-d} ${x:+d} ${x#p}`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paddock.sandbox.images.dockerfiles.syntax import line_error

if TYPE_CHECKING:
    from collections.abc import Mapping

SPECIAL_PARAMETERS = "@*#?-$!0"
NAME = re.compile(r"\d+|\w+")


class Expander:
    """Expands the text of one instruction, with the variables at that place."""

    def __init__(self, variables: Mapping[str, str], escape: str, line: int) -> None:
        self._variables = variables
        self._escape = escape
        self._line = line
        self._text = ""
        self._position = 0

    def expand(self, text: str) -> str:
        """The text with its variables replaced, and its quotes and escapes removed."""
        self._text, self._position = text, 0
        return self._read_until("", has_quotes=True)

    def expand_heredoc(self, text: str) -> str:
        """The text with its variables replaced. Quotes mean nothing in a heredoc."""
        self._text, self._position = text, 0
        return self._read_until("", has_quotes=False)

    # -- reading --------------------------------------------------------------------------------------

    def _peek(self) -> str:
        return self._text[self._position : self._position + 1]

    def _next(self) -> str:
        character = self._peek()
        self._position += 1
        return character

    def _read_until(self, stop: str, *, has_quotes: bool, keeps_escapes: bool = False) -> str:
        parts: list[str] = []
        while character := self._next():
            if character == stop:
                return "".join(parts)
            if character == "$":
                parts.append(self._read_variable(has_quotes))
            elif has_quotes and character == "'":
                parts.append(self._read_single_quotes())
            elif has_quotes and character == '"':
                parts.append(self._read_double_quotes())
            elif character == self._escape:
                parts.append(self._read_escaped(has_quotes, keeps_escapes))
            else:
                parts.append(character)
        if stop:
            raise line_error(self._line, f"{stop!r} is missing in {self._text!r}", "close the ${…}")
        return "".join(parts)

    def _read_escaped(self, has_quotes: bool, keeps_escapes: bool) -> str:
        if not has_quotes and self._peek() not in ("$", self._escape):
            return self._escape
        return (self._escape if keeps_escapes else "") + self._next()

    def _read_single_quotes(self) -> str:
        end = self._text.find("'", self._position)
        if end < 0:
            raise line_error(self._line, f"a single quote is not closed in {self._text!r}", "close it")
        part, self._position = self._text[self._position : end], end + 1
        return part

    def _read_double_quotes(self) -> str:
        parts: list[str] = []
        while character := self._next():
            if character == '"':
                return "".join(parts)
            if character == "$":
                parts.append(self._read_variable(True))
            elif character == self._escape and self._peek() in ('"', "$", self._escape):
                parts.append(self._next())
            else:
                parts.append(character)
        raise line_error(self._line, f"a double quote is not closed in {self._text!r}", "close it")

    # -- variables ------------------------------------------------------------------------------------

    def _read_name(self) -> str:
        match = NAME.match(self._text, self._position)
        if match is not None:
            self._position = match.end()
            return match[0]
        return self._next() if self._peek() and self._peek() in SPECIAL_PARAMETERS else ""

    def _read_variable(self, has_quotes: bool) -> str:
        if self._peek() != "{":
            name = self._read_name()
            return self._variables.get(name, "") if name else "$"
        self._next()
        name = self._read_name()
        operator = self._next()
        if not name or not operator:
            raise line_error(self._line, f"{self._text!r} has a ${{…}} that is not complete", "write ${name}")
        value = self._variables.get(name)
        if operator == "}":
            return value or ""
        if operator == "/":
            return self._replace(value or "", has_quotes)
        if operator == ":":
            operator = self._next()
            value = value or None
            if operator not in ("-", "+", "?"):
                raise self._unsupported(f":{operator}")
        word = self._read_until("}", has_quotes=has_quotes, keeps_escapes=operator in "#%")
        return self._apply(operator, name, value, word)

    def _apply(self, operator: str, name: str, value: str | None, word: str) -> str:
        if operator == "-":
            return word if value is None else value
        if operator == "+":
            return "" if value is None else word
        if operator == "?":
            if value is None:
                raise line_error(self._line, f"{name}: {word or 'has no value'}", f"give --build-arg {name}=…")
            return value
        if operator in ("#", "%"):
            return _trim(value or "", word, operator)
        raise self._unsupported(operator)

    def _unsupported(self, operator: str) -> Exception:
        return line_error(
            self._line, f"the modifier {operator!r} in {self._text!r} is not supported", "use ${name:-default}"
        )

    def _replace(self, value: str, has_quotes: bool) -> str:
        replaces_all = self._peek() == "/"
        if replaces_all:
            self._next()
        pattern = self._read_until("/", has_quotes=has_quotes, keeps_escapes=True)
        replacement = self._read_until("}", has_quotes=has_quotes)
        return re.sub(_regex(pattern), lambda _: replacement, value, count=0 if replaces_all else 1)


def _regex(pattern: str) -> str:
    parts = []
    characters = iter(pattern)
    for character in characters:
        if character == "\\":
            parts.append(re.escape(next(characters, "\\")))
        else:
            parts.append({"*": ".*", "?": "."}.get(character) or re.escape(character))
    return "(?s:" + "".join(parts) + ")"


def _trim(value: str, word: str, operator: str) -> str:
    """`#` removes a prefix, `%` a suffix; doubled, the longest one."""
    is_longest = word.startswith(operator)
    pattern = re.compile(_regex(word[1:] if is_longest else word))
    lengths = range(len(value) + 1)
    for length in reversed(lengths) if is_longest else lengths:
        part = value[:length] if operator == "#" else value[len(value) - length :]
        if pattern.fullmatch(part):
            return value[length:] if operator == "#" else value[: len(value) - length]
    return value
