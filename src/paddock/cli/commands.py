"""The commands by name. Each is imported when it is run."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

from paddock.distribution import VERSION
from paddock.errors import ConfigError

COMMANDS = {
    "serve": ("paddock.cli.serve", "Serve an environment over HTTP, WebSocket and MCP."),
    "check": ("paddock.cli.check", "Find out what an environment or a server gets wrong."),
    "rollout": ("paddock.cli.rollout", "Run a coding agent on tasks, capture its tokens, score its work."),
    "tasks": ("paddock.cli.tasks", "List, fetch and check task sets."),
    "agents": ("paddock.cli.agents", "List the agents that can be run, and fetch them."),
    "image": ("paddock.cli.image", "Pull, import, build and remove images."),
    "trace": ("paddock.cli.trace", "Look at rollouts, and take them out of the store."),
    "view": ("paddock.cli.view", "Look at rollouts in the browser."),
    "fleet": ("paddock.cli.fleet", "Host environments as Fleet does, and run tasks on them."),
    "e2b": ("paddock.cli.e2b", "Run programs that were written for E2B on this machine."),
    "probe": ("paddock.cli.probe", "Find out what a model endpoint gives back."),
    "new": ("paddock.cli.new", "Start a project for an environment of your own."),
    "doctor": ("paddock.cli.doctor", "Check what this machine has and lacks."),
}


class Commands(click.Group):
    """Lists all commands, and imports only the one that is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], COMMANDS, 1)
            hint = f"did you mean paddock {close[0]}?" if close else "paddock --help lists the commands"
            raise ConfigError(f"there is no command {args[0]!r}", hint=hint)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            # For an option without its value, Click does not name the command.
            if error.ctx is None and ctx.invoked_subcommand:
                command = self.get_command(ctx, ctx.invoked_subcommand) or self
                error.ctx = click.Context(command, ctx, ctx.invoked_subcommand)
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="paddock")
def paddock() -> None:
    """Environments for LLM agents: serve them, run agents in them, keep every token."""
