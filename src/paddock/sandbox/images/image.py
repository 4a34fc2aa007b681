"""An image as a value: which layers its root has, and what it says about the programs in it. Nothing here does IO."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DOCKERFILE = "Dockerfile"
ROOT = PurePosixPath("/")


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A command that succeeds once the services of an image are ready. Times are in seconds."""

    argv: tuple[str, ...]
    interval: float = 30.0
    timeout: float = 30.0
    start_period: float = 0.0
    """Failures in this time after the start do not count."""
    start_interval: float = 5.0
    """The interval during `start_period`."""
    retries: int = 3


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says about the programs that run in it."""

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: PurePosixPath = ROOT
    user: str = ""
    """`NAME`, `UID`, `NAME:GROUP` or `UID:GID`. Empty: root."""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    labels: Mapping[str, str] = field(default_factory=dict)
    exposed_ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    health_check: HealthCheck | None = None
    on_build: tuple[str, ...] = ()
    """ONBUILD instructions, which builds from this image would have to run. They are not supported."""


@dataclass(frozen=True, slots=True)
class Image:
    """A root filesystem as layers, with its config."""

    name: str
    """The name it was asked for by, or its digest."""
    digest: str
    """`sha256:…` of its config as JSON. Two images with the same digest are the same."""
    layers: tuple[str, ...]
    """The diff id of each layer (`sha256:…` of the uncompressed archive, or of what a build step is made from),
    lowest first."""
    config: ImageConfig = field(default_factory=ImageConfig)
    platform: str = "linux/amd64"
