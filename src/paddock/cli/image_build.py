"""`paddock image build`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from paddock.cli import note, print_json
from paddock.errors import ConfigError, ImageError
from paddock.limits import BUILD_SECONDS

if TYPE_CHECKING:
    from paddock.sandbox.images.dockerfiles.events import BuildEvent


@click.command("build")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--tag", "name", metavar="NAME", help="Name of the image. Default: one made from its digest.")
@click.option("--target", metavar="STAGE", help="Stage to build. Default: the last one.")
@click.option("--build-arg", "assignments", multiple=True, metavar="NAME=VALUE", help="Value of an ARG. Repeatable.")
@click.option("--file", "dockerfile", default="Dockerfile", show_default=True, help="Dockerfile, relative to DIR.")
@click.option(
    "--network",
    default="public",
    show_default=True,
    metavar="POLICY",
    help="What RUN steps may connect to: no-network, allowlist:HOST,HOST, or public.",
)
@click.option("--timeout", default=BUILD_SECONDS, show_default=True, help="Seconds that the build may take.")
@click.option("--no-cache", is_flag=True, help="Run every step again.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    folder: Path,
    name: str | None,
    target: str | None,
    assignments: tuple[str, ...],
    dockerfile: str,
    network: str,
    timeout: float,
    no_cache: bool,
    as_json: bool,
) -> None:
    """Build the Dockerfile in DIR, with the files of DIR as its context."""
    from paddock.cli.interrupts import run_async
    from paddock.sandbox.images.build import build_image
    from paddock.sandbox.images.dockerfiles.context import BuildContext
    from paddock.sandbox.network.policy import NetworkPolicy

    path = folder / dockerfile
    if not folder.is_dir():
        raise ImageError(f"there is no folder {folder}", hint="give the folder that has the Dockerfile")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"{path} cannot be read: {reason}", hint="name the Dockerfile with --file") from error
    image = run_async(
        build_image(
            text,
            BuildContext(folder.resolve(), dockerfile),
            name=name,
            target=target,
            build_args=dict(map(split_assignment, assignments)),
            network=NetworkPolicy.parse(network),
            timeout=timeout,
            on_progress=show_event,
            use_cache=not no_cache,
        )
    )
    if as_json:
        print_json({"name": image.name, "digest": image.digest, "layers": list(image.layers)})
    else:
        click.echo(f"{image.name} {image.digest}")


def split_assignment(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise ConfigError(f"--build-arg is {text!r}", hint="write --build-arg NAME=VALUE")
    return name, value


def show_event(event: BuildEvent) -> None:
    """One line for each step and its end, and its output between them."""
    position = f"[{event.step}/{event.steps}]"
    if event.kind == "started":
        note(f"{position} {event.text}")
    elif event.kind == "output":
        click.echo(event.text, err=True, nl=False)
    elif event.kind == "cached":
        note(f"{position} cached")
    elif event.kind != "connection":
        note(f"{position} {event.kind} in {event.seconds:.1f} s")
