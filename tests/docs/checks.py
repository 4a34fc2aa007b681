"""What is checked of every block, also of those that cannot be run here: its commands and its imports."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from types import ModuleType

import click
from click.testing import CliRunner

from paddock.cli.commands import paddock
from paddock.errors import ConfigError

HEREDOC = re.compile(r"<<'?(\w+)'?.*?\n.*?\n\1\n", re.DOTALL)
OPERATORS = set("();<>|&")


def find_commands(text: str) -> Iterator[list[str]]:
    """The arguments of each call of `paddock` in a shell text."""
    for line in HEREDOC.sub("\n", text).replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*split(line), ";"]:
            if not set(word) <= OPERATORS:
                words.append(word)
                continue
            while words and re.match(r"\w+=", words[0]):
                del words[0]
            if words and words[0].rpartition("/")[2] == "paddock":
                yield words[1:]
            words = []


def split(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def parse_command(words: list[str]) -> str | None:
    """Why `paddock WORDS` is refused before its values are looked at; None if it is not."""
    try:
        # Unknown commands and options are refused before --help ends the rest.
        CliRunner().invoke(paddock, [*words, "--help"], standalone_mode=False, catch_exceptions=False)
    except (click.ClickException, ConfigError) as error:
        return str(error)
    return None


def find_imports(text: str) -> Iterator[tuple[ModuleType, str | None]]:
    """The modules of Paddock that a Python text imports, and the names from them."""
    program = compile(text, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    for node in ast.walk(program):
        if isinstance(node, ast.Import):
            yield from ((importlib.import_module(alias.name), None) for alias in node.names if is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
            module = importlib.import_module(node.module or "")
            yield from ((module, alias.name) for alias in node.names)


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == "paddock"
