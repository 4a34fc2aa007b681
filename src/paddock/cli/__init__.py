"""The `paddock` command. Commands parse, call the library, and print. Each is imported when it is run.

Everything but the handler of Ctrl-C is imported inside functions, so that Ctrl-C prints one line from the beginning.
"""

from __future__ import annotations

import errno
import sys
from typing import IO, Any

from paddock.cli.interrupts import INTERRUPTED as INTERRUPTED
from paddock.cli.interrupts import exit_on_interrupt, raise_on_interrupt
from paddock.distribution import EXTRAS, package_command

MISSING_PACKAGE = 1
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Errors end with their own exit code, and a hint under the message."""
    exit_on_interrupt()
    try:
        sys.exit(run(arguments))
    except KeyboardInterrupt:
        print_error("interrupted")
        sys.exit(INTERRUPTED)
    finally:
        if arguments is not None:  # called by a program that goes on
            raise_on_interrupt()


def run(arguments: list[str] | None) -> int:
    """The exit code of a command line."""
    import click

    from paddock.cli.commands import paddock
    from paddock.errors import PaddockError

    try:
        result = paddock.main(arguments, prog_name="paddock", standalone_mode=False)
    except PaddockError as error:
        print_error(str(error), error.hint)
        return error.exit_code
    except click.ClickException as error:
        # Click 8.1 shows the help without raising.
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
            click.echo(error.format_message(), err=True)
            return error.exit_code
        context = getattr(error, "ctx", None)
        print_error(error.format_message(), f"{context.command_path if context else 'paddock'} --help")
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        print_error(f"this command needs {error.name}", package_command(error.name))
        return MISSING_PACKAGE
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        place = error.filename or "the output"
        print_error(f"{place} cannot be written: {error.strerror}", "what was written is incomplete: make room first")
        return 1
    except click.Abort:
        print_error("interrupted")
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def print_error(message: str, hint: str | None = None) -> None:
    """Print an error and a hint on stderr."""
    import click

    from paddock.config import NO_COLOR

    # Click only checks whether stderr is a terminal.
    colour = False if NO_COLOR.read() else None
    click.secho("error: ", fg="red", bold=True, nl=False, err=True, color=colour)
    click.echo(message, err=True)
    if hint:
        click.secho("hint: ", fg="cyan", nl=False, err=True, color=colour)
        click.echo(hint, err=True)


def refuse_unused(*names: str, why: str, hint: str) -> None:
    """Raise ConfigError for the first of these options that is on the command line: it would have no effect."""
    import click

    from paddock.errors import ConfigError

    context = click.get_current_context()
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(f"{max(option.opts, key=len)} has no effect: {why}", hint=hint)


def note(text: str) -> None:
    """Print a message on stderr. Stdout is for data."""
    import click

    click.echo(text, err=True)


def plural(number: int, one: str, many: str | None = None) -> str:
    """`1 session`, `2 sessions`."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def print_json(document: Any, file: IO[str] | None = None) -> None:
    import click

    from paddock.protocol.codec import encode

    click.echo(encode(document).decode(), file=file)
