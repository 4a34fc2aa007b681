"""The lines of a Dockerfile as instructions: directives, continuations, comments, flags, heredocs. Expands nothing.

The parser is our own: `dockerfile-parse` takes the lines of a heredoc for instructions, and `dockerfile` loads a Go
runtime into the process, has wheels for x86-64 only and gives no line for an error.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from paddock.errors import ImageError

DEFAULT_ESCAPE = "\\"
DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*")
HEREDOC = re.compile(r"(\d*)<<(-?)([^<]*)")
HEREDOC_WORD = re.compile(r"[A-Za-z_][\w.-]*")
HEREDOC_KEYWORDS = ("ADD", "COPY", "RUN")
KNOWN_DIRECTIVES = ("escape", "syntax", "check")
MAX_DOCKERFILE_CHARACTERS = 1_000_000


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A file that is written in the Dockerfile itself."""

    name: str
    content: str
    expands: bool
    """Whether variables in it are expanded: the name was not quoted."""
    strips_tabs: bool
    """`<<-NAME`: leading tabs of its lines are not part of it."""

    @property
    def text(self) -> str:
        if not self.strips_tabs:
            return self.content
        return "".join(line.lstrip("\t") for line in self.content.splitlines(keepends=True))


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction with its line, flags and arguments, as written."""

    line: int
    keyword: str
    """In upper case."""
    flags: tuple[tuple[str, str | None], ...]
    """Name and value of each `--name=value`; the value is None without `=`."""
    rest: str
    """All that follows the flags, on one line."""
    heredocs: tuple[Heredoc, ...] = ()
    heredoc_lines: str = ""
    """The lines of all heredocs, with their ends."""

    @property
    def text(self) -> str:
        """As it is shown to the user."""
        flags = "".join(f" --{name}" if value is None else f" --{name}={value}" for name, value in self.flags)
        return f"{self.keyword}{flags} {self.rest}".rstrip()

    def parse_json(self) -> tuple[str, ...] | None:
        """The arguments in exec form (`["a", "b"]`); None for the shell form."""
        return parse_json_list(self.rest, self.line)


@dataclass(frozen=True, slots=True)
class DockerfileText:
    """A Dockerfile, cut into instructions."""

    instructions: tuple[Instruction, ...]
    escape: str = DEFAULT_ESCAPE


def line_error(line: int, message: str, hint: str, *, fault: str | None = None) -> ImageError:
    """An error in a line of the Dockerfile. `fault` is its name in the table of docs/tasks.md."""
    data = {"fault": fault} if fault else {}
    return ImageError(f"Dockerfile line {line}: {message}", hint=hint, line=line, **data)


def unsupported(line: int, message: str, hint: str) -> ImageError:
    """An error for a part of the language that is left out here."""
    return line_error(line, message, hint, fault="not-supported")


def parse_json_list(text: str, line: int) -> tuple[str, ...] | None:
    if not text.lstrip().startswith("["):
        return None
    try:
        words = json.loads(text)
    except ValueError:
        return None
    if not isinstance(words, list):
        return None
    if not all(isinstance(word, str) for word in words):
        raise line_error(line, "a list has a value that is not a string", "put every word into double quotes")
    return tuple(words)


def parse_lines(text: str) -> DockerfileText:
    """Raises ImageError with the line where the text is no Dockerfile."""
    if len(text) > MAX_DOCKERFILE_CHARACTERS:
        raise ImageError("the Dockerfile is too large", hint=f"it can have {MAX_DOCKERFILE_CHARACTERS:,} characters")
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise line_error(line, "there is a zero byte", "a Dockerfile is text in UTF-8")
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    escape = _read_escape(lines)
    instructions = []
    position = 0
    while position < len(lines):
        if _is_blank(lines[position]):
            position += 1
            continue
        first = position + 1
        logical, position = _join_lines(lines, position, escape)
        instruction, position = _read_instruction(logical, first, lines, position, escape)
        instructions.append(instruction)
    if not instructions:
        raise ImageError("the Dockerfile has no instructions", hint="it starts with FROM")
    return DockerfileText(tuple(instructions), escape)


def _is_blank(line: str) -> bool:
    stripped = line.strip()
    return not stripped or stripped.startswith("#")


def _read_escape(lines: list[str]) -> str:
    """The value of the directive `# escape=`, which comes before everything else."""
    seen: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = DIRECTIVE.fullmatch(line.strip())
        if match is None or match[1].lower() not in KNOWN_DIRECTIVES:
            break
        name = match[1].lower()
        if name in seen:
            raise line_error(number, f"the directive {name} is there twice", "remove one")
        if name == "escape" and match[2] not in ("\\", "`"):
            raise line_error(number, f"the escape character is {match[2]!r}", "it is \\ or `")
        seen[name] = match[2]
    return seen.get("escape", DEFAULT_ESCAPE)


def _join_lines(lines: list[str], position: int, escape: str) -> tuple[str, int]:
    """A line with its continuations, without comments and empty lines between them, and the position after it."""
    continuation = re.compile(re.escape(escape) + r"[ \t]*$")
    text = lines[position].lstrip()
    position += 1
    joined = continuation.sub("", text, count=1)
    is_continued = joined != text
    while is_continued and position < len(lines):
        text = lines[position]
        position += 1
        if _is_blank(text):
            continue
        part = continuation.sub("", text, count=1)
        is_continued = part != text
        joined += part
    return joined.strip(), position


def _read_instruction(
    logical: str, line: int, lines: list[str], position: int, escape: str
) -> tuple[Instruction, int]:
    keyword, _, rest = re.sub(r"^(\S+)\s*", "\\1\0", logical, count=1).partition("\0")
    keyword = keyword.upper()
    flags, rest = _split_flags(rest, line, escape)
    heredocs: list[Heredoc] = []
    heredoc_lines: list[str] = []
    if keyword in HEREDOC_KEYWORDS and parse_json_list(rest, line) is None:
        for name, expands, strips_tabs in _heredoc_names(rest, escape):
            start = position
            content, position = _read_heredoc(lines, position, name, strips_tabs, line)
            heredocs.append(Heredoc(name, content, expands, strips_tabs))
            heredoc_lines += [f"{text}\n" for text in lines[start:position]]
    return Instruction(line, keyword, flags, rest, tuple(heredocs), "".join(heredoc_lines)), position


def _split_flags(rest: str, line: int, escape: str) -> tuple[tuple[tuple[str, str | None], ...], str]:
    flags: list[tuple[str, str | None]] = []
    while rest.startswith("--"):
        word, rest = _cut_word(rest, escape)
        if word == "--":
            break
        name, separator, value = word[2:].partition("=")
        if not name:
            raise line_error(line, f"the flag {word!r} has no name", "write --name=value")
        flags.append((name, value if separator else None))
    return tuple(flags), rest


def _cut_word(text: str, escape: str) -> tuple[str, str]:
    """The first word without its quotes, and the rest."""
    word = ""
    quote = ""
    position = 0
    while position < len(text):
        character = text[position]
        if character == escape and quote != "'" and position + 1 < len(text):
            position += 1
            word += text[position]
        elif quote:
            quote, word = ("", word) if character == quote else (quote, word + character)
        elif character in "'\"":
            quote = character
        elif character.isspace():
            break
        else:
            word += character
        position += 1
    return word, text[position:].lstrip()


def _heredoc_names(rest: str, escape: str) -> list[tuple[str, bool, bool]]:
    """Name, whether it expands, and whether it strips tabs, of each heredoc that a line begins."""
    names = []
    for word in split_quoted(rest, escape):
        match = HEREDOC.fullmatch(word)
        if match is None:
            continue
        name, _ = _cut_word(match[3], escape)
        if name and HEREDOC_WORD.fullmatch(name):
            names.append((name, name == match[3], match[2] == "-"))
    return names


def _read_heredoc(lines: list[str], position: int, name: str, strips_tabs: bool, line: int) -> tuple[str, int]:
    content: list[str] = []
    while position < len(lines):
        text = lines[position]
        position += 1
        if (text.lstrip("\t") if strips_tabs else text) == name:
            return "".join(f"{one}\n" for one in content), position
        content.append(text)
    raise line_error(line, f"the heredoc {name} has no end", f"put {name} alone on a line after it")


def split_quoted(text: str, escape: str) -> list[str]:
    """The words of a text. Quotes and escapes stay in the words, and spaces within quotes do not separate words."""
    words: list[str] = []
    word = ""
    quote = ""
    position = 0
    while position < len(text):
        character = text[position]
        if character == escape and quote != "'" and position + 1 < len(text):
            word += character + text[position + 1]
            position += 2
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character.isspace():
            words += [word] if word else []
            word = ""
            position += 1
            continue
        word += character
        position += 1
    return [*words, word] if word else words
