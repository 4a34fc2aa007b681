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
    "check": ("paddock.cli.check", "Test an environment, a server at a URL, or tasks."),
    "rollout": ("paddock.cli.rollout", "Run a coding agent on tasks, record its tokens, score its work."),
    "tasks": ("paddock.cli.tasks", "List, fetch and check task sets."),
    "agents": ("paddock.cli.agents", "List and install agents."),
    "image": ("paddock.cli.image", "Pull, import, build and remove images."),
    "trace": ("paddock.cli.trace", "List, show, export and delete rollouts."),
    "view": ("paddock.cli.view", "Show rollouts in the browser."),
    "fleet": ("paddock.cli.fleet", "Start a Fleet-compatible control plane, and run tasks on it."),
    "e2b": ("paddock.cli.e2b", "Start a local server that E2B's SDK can use."),
    "probe": ("paddock.cli.probe", "Find out what a model endpoint returns: tokens, logprobs or text."),
    "new": ("paddock.cli.new", "Create a project with an environment, a test and a Dockerfile."),
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
    """Serve environments to LLM agents, run agents in them, and record every token."""
