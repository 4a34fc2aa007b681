"""docs/reference/commands.md: the help of every command, as `--help` prints it.

python -m scripts.docs.commands
"""

from collections.abc import Iterator

import click

from paddock.cli.commands import paddock
from paddock.cli.rollout import WithDefault
from scripts.docs import REPOSITORY

PAGE = REPOSITORY / "docs" / "reference" / "commands.md"
WIDTH = 100
INTRODUCTION = """# Commands

What `--help` prints for every command. Data goes to stdout, messages go to stderr. `--json` is for programs.

<!-- Written by `python -m scripts.docs.commands`. -->
"""


def walk(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """The name and the help of a command and of all commands below it."""
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            # The help of `paddock rollout` is that of `paddock rollout run` already.
            repeated = isinstance(command, WithDefault) and name == "run"
            if child is not None and not child.hidden and not repeated:
                yield from walk(child, open_context(child, name, context))


def open_context(command: click.Command, name: str, parent: click.Context | None = None) -> click.Context:
    settings = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    return click.Context(command, parent, name, **settings)


def render() -> str:
    sections = []
    for name, text in walk(paddock, open_context(paddock, "paddock")):
        level = min(len(name.split()) + 1, 4)
        sections.append(f"{'#' * level} {name}\n\n```text\n{text.rstrip()}\n```\n")
    return "\n".join([INTRODUCTION, *sections])


if __name__ == "__main__":
    PAGE.write_text(render())
