"""The `paddock` command. Commands parse, call the library, and print; each is imported when run."""

from __future__ import annotations

import importlib
import sys
from typing import IO, Any

import click

from paddock import __version__
from paddock.errors import ConfigError, PaddockError

COMMANDS = {
    "serve": ("paddock.cli.serve", "Serve an environment over HTTP, WebSocket and MCP."),
    "check": ("paddock.cli.check", "Find out what an environment or a server gets wrong."),
    "rollout": ("paddock.cli.rollout", "Run a coding agent on tasks, capture its tokens, score its work."),
    "agents": ("paddock.cli.agents", "List the agents that can be run, and fetch them."),
    "trace": ("paddock.cli.trace", "Look at rollouts, and take them out of the store."),
    "view": ("paddock.cli.view", "Look at rollouts in the browser."),
    "fleet": ("paddock.cli.fleet", "Host environments as Fleet does, and run tasks on them."),
    "e2b": ("paddock.cli.e2b", "Run programs that were written for E2B on this machine."),
    "probe": ("paddock.cli.probe", "Find out what a model endpoint gives back."),
    "new": ("paddock.cli.new", "Start a project for an environment of your own."),
    "doctor": ("paddock.cli.doctor", "Tell what this machine has and lacks."),
}
EXTRAS = {
    "aiohttp": "rollouts",
    "zstandard": "rollouts",
    "gymnasium": "gymnasium",
    "pyarrow": "parquet",
    "ray": "ray",
}
"""Packages that the base install does not bring, and the extra that does."""
INTERRUPTED = 130
MISSING = 1


class Commands(click.Group):
    """Knows every command by name and loads only the one that is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="paddock")
def paddock() -> None:
    """Environments for LLM agents: serve them, run agents in them, keep every token."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Errors end with their own exit code, and a hint under the message."""
    try:
        result = paddock.main(arguments, prog_name="paddock", standalone_mode=False)
    except PaddockError as error:
        complain(str(error), error.hint)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        complain(error.format_message(), f"{context.command_path} --help" if context else None)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "")
        if extra is None:
            raise
        complain(f"this command needs {error.name}", f"pip install 'paddock[{extra}]'")
        sys.exit(MISSING)
    except (click.Abort, KeyboardInterrupt):
        complain("interrupted")
        sys.exit(INTERRUPTED)
    sys.exit(result if isinstance(result, int) else 0)


def complain(message: str, hint: str | None = None) -> None:
    """Say what went wrong on stderr, and what to do about it."""
    click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    click.echo(message, err=True)
    if hint:
        click.secho("hint: ", fg="cyan", nl=False, err=True)
        click.echo(hint, err=True)


def refuse_unused(*names: str, why: str, hint: str) -> None:
    """Raise ConfigError for the first of these parameters of the command that was given: it would do nothing."""
    context = click.get_current_context()
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE
        if given and option.name in names:
            raise ConfigError(f"{max(option.opts, key=len)} has no effect: {why}", hint=hint)


def note(text: str) -> None:
    """Words go to stderr; stdout is for data."""
    click.echo(text, err=True)


def print_json(document: Any, file: IO[str] | None = None) -> None:
    from paddock.protocol.codec import encode

    click.echo(encode(document).decode(), file=file)
