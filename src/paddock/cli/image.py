"""`paddock image ls|pull|build|import|export|rm|prune`: images on this machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import click

from paddock.cli import image_build, note, plural, print_json
from paddock.cli.quantities import SizeType, show_size
from paddock.errors import ConfigError, ImageError

if TYPE_CHECKING:
    from paddock.sandbox.images.image import Image, ImageConfig
    from paddock.sandbox.images.registry.pull import PullProgress
    from paddock.sandbox.images.store import StoredImage

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
SHORT_DIGEST_CHARACTERS = 19
PROGRESS_SECONDS = 0.2


@click.group("image")
def command() -> None:
    """Pull, import, build and remove images. No container runtime is needed."""


command.add_command(image_build.command)


@command.command("ls")
@json_option
def list_command(as_json: bool) -> int:
    """List the images on this machine."""
    from paddock.sandbox.images.store import default_store

    stored = default_store().list_images()
    if as_json:
        for one in stored:
            print_json(describe(one))
    elif stored:
        print_table(stored)
    else:
        note("there are no images; paddock image pull NAME fetches one")
    return 0


@command.command("pull")
@click.argument("name")
@click.option("--platform", help="For example linux/arm64. Default: this machine's.")
@json_option
def pull_command(name: str, platform: str | None, as_json: bool) -> int:
    """Fetch an image from its registry, or from a mirror (PADDOCK_IMAGE_MIRRORS)."""
    from paddock.cli.interrupts import run_async
    from paddock.sandbox.images.registry.pull import PullProgress, pull_image
    from paddock.sandbox.images.store import default_store

    with ProgressLine(name) as line:
        progress = PullProgress(line.show)
        image = run_async(pull_image(name, default_store(), platform=platform, progress=progress))
    report(image, as_json)
    return 0


@command.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("name")
@click.option("--workdir", default="", help="Folder in which commands start. For plain roots, like the next options.")
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="A variable. Repeatable.")
@click.option("--user", default="", help="User of all commands: NAME, UID, NAME:GROUP or UID:GID.")
@click.option("--cmd", "command_line", default="", help="Command that the image runs, as a line for sh.")
@json_option
def import_command(
    source: Path, name: str, workdir: str, variables: tuple[str, ...], user: str, command_line: str, as_json: bool
) -> int:
    """Store SOURCE as the image NAME.

    SOURCE is an archive of docker save, an OCI layout (archive or folder), or a root filesystem (archive or folder).
    Archives may be compressed with gzip, zstd, xz or bzip2.
    """
    from paddock.cli.interrupts import run_async
    from paddock.sandbox.images.importing import import_image

    config = plain_root_config(workdir, variables, user, command_line)
    report(run_async(import_image(source, name, config=config)), as_json)
    return 0


@command.command("export")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
def export_command(name: str, file: Path) -> int:
    """Write the image NAME to FILE, for docker load, podman load or skopeo."""
    from paddock.cli.interrupts import run_async
    from paddock.sandbox.images.exporting import export_image
    from paddock.sandbox.images.store import default_store

    image = default_store().find(name)
    if image is None:
        raise ImageError(f"there is no image {name!r}", hint="paddock image ls lists them")
    run_async(export_image(image, file))
    note(f"{file} is written, {show_size(file.stat().st_size)}")
    return 0


@command.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME…")
def remove_command(names: tuple[str, ...]) -> int:
    """Remove images. Layers that no other image has are removed too."""
    from paddock.sandbox.images.store import default_store

    store = default_store()
    for name in names:
        if not store.remove(name):
            raise ImageError(f"there is no image {name!r}", hint="paddock image ls lists them")
    result = store.prune()
    note(f"{plural(len(names), 'image')} removed, {show_size(result.freed_bytes)} freed")
    return 0


@command.command("prune")
@click.option(
    "--max-size", type=SizeType(), help="Also remove the least recently used images until the rest fits: 20GB."
)
@json_option
def prune_command(max_size: int | None, as_json: bool) -> int:
    """Remove layers that no image has, and what interrupted commands left. Imported images stay."""
    from paddock.sandbox.images.store import default_store

    result = default_store().prune(max_size)
    if as_json:
        print_json(
            {
                "images": list(result.images),
                "layers": result.layers,
                "freed_bytes": result.freed_bytes,
                "left_bytes": result.left_bytes,
            }
        )
        return 0
    for name in result.images:
        note(f"removed {name}")
    note(
        f"{plural(result.layers, 'layer')} removed, {show_size(result.freed_bytes)} freed, "
        f"{show_size(result.left_bytes)} left"
    )
    if max_size is not None and result.left_bytes > max_size:
        note("the rest is in use, or was imported: paddock image rm NAME removes an imported image")
    return 0


def plain_root_config(workdir: str, variables: tuple[str, ...], user: str, command_line: str) -> ImageConfig | None:
    """What the options say about a plain root. None if there are none."""
    from dataclasses import replace

    from paddock.sandbox.images.importing import ROOT_CONFIG

    if not (workdir or variables or user or command_line):
        return None
    pairs = [entry.partition("=") for entry in variables]
    if not all(name and equals for name, equals, _ in pairs):
        raise ConfigError("--env has a value without '='", hint="write --env NAME=VALUE")
    if workdir and (not workdir.startswith("/") or ".." in PurePosixPath(workdir).parts):
        raise ConfigError(f"--workdir is {workdir!r}", hint="give an absolute path")
    return replace(
        ROOT_CONFIG,
        workdir=PurePosixPath(workdir or "/"),
        env={**ROOT_CONFIG.env, **{name: value for name, _, value in pairs}},
        user=user,
        cmd=("/bin/sh", "-c", command_line) if command_line else ROOT_CONFIG.cmd,
    )


def report(image: Image, as_json: bool) -> None:
    if as_json:
        print_json({"name": image.name, "digest": image.digest, "platform": image.platform, "layers": image.layers})
    else:
        click.echo(f"{image.name} {image.digest}")


def describe(stored: StoredImage) -> dict[str, Any]:
    return {
        "name": stored.image.name,
        "digest": stored.image.digest,
        "platform": stored.image.platform,
        "layers": stored.image.layers,
        "disk_bytes": stored.disk_bytes,
        "source": stored.source,
        "saved_at": stored.saved_at,
        "used_at": stored.used_at,
    }


def print_table(images: list[StoredImage]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("name", "digest", "platform", "layers", "size", "from", "used"):
        table.add_column(name, justify="right" if name in ("layers", "size") else "left", no_wrap=name == "name")
    for one in images:
        table.add_row(
            one.image.name,
            one.image.digest[:SHORT_DIGEST_CHARACTERS],
            one.image.platform,
            str(len(one.image.layers)),
            show_size(one.disk_bytes),
            one.source,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used_at)),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


class ProgressLine:
    """One line on a terminal that shows how far a pull is. Elsewhere nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_live = sys.stderr.isatty()
        self._shown_at = 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live and self._shown_at:
            click.echo("\r\x1b[K", nl=False, err=True)

    def show(self, progress: PullProgress) -> None:
        now = time.monotonic()
        if not self._is_live or now - self._shown_at < PROGRESS_SECONDS:
            return
        self._shown_at = now
        amount = f"{show_size(progress.received_bytes)} of {show_size(progress.total_bytes)}"
        layers = f"{progress.finished_layers} of {plural(progress.layers, 'layer')}"
        click.echo(f"\r\x1b[K{self._name}: {amount}, {layers} ready", nl=False, err=True)
