"""Names of images, as registries read them: `ubuntu:24.04`, `ghcr.io/owner/name@sha256:…`, `localhost:5000/name`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paddock.errors import ImageError

DEFAULT_REGISTRY = "docker.io"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"
MAX_REPOSITORY_CHARACTERS = 255
HINT = "write it as [REGISTRY/]NAME[:TAG][@sha256:DIGEST], for example ubuntu:24.04"

COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?")
TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ImageReference:
    """Where an image is: a repository of a registry, and a tag or a digest in it."""

    registry: str
    repository: str
    tag: str = DEFAULT_TAG
    digest: str = ""
    """The digest of a manifest. If it is set, the tag has no effect."""

    def __str__(self) -> str:
        """The full name, which is the same for all spellings of it."""
        return f"{self.registry}/{self.repository}{self.suffix}"

    @property
    def suffix(self) -> str:
        return f"@{self.digest}" if self.digest else f":{self.tag}"

    @property
    def selector(self) -> str:
        """The tag or the digest, as the manifest's address has it."""
        return self.digest or self.tag

    @property
    def short(self) -> str:
        """The name without the parts that are the default: `ubuntu:24.04`."""
        repository = self.repository
        if self.registry != DEFAULT_REGISTRY:
            repository = f"{self.registry}/{repository}"
        else:
            repository = repository.removeprefix(f"{DEFAULT_NAMESPACE}/")
        return repository + self.suffix


def is_digest(text: str) -> bool:
    return DIGEST.fullmatch(text) is not None


def parse_reference(name: str) -> ImageReference:
    """Raises ImageError if `name` cannot be the name of an image."""
    rest, at, digest = name.partition("@")
    if at and not is_digest(digest):
        raise _invalid(name, f"{digest!r} is not sha256: and 64 hexadecimal digits")
    tag = ""
    if (colon := rest.rfind(":")) > rest.rfind("/"):
        rest, tag = rest[:colon], rest[colon + 1 :]
        if not TAG.fullmatch(tag):
            raise _invalid(name, f"{tag!r} is not a tag")
    registry, repository = _split_registry(rest)
    if not HOST.fullmatch(registry):
        raise _invalid(name, f"{registry!r} is not a host")
    _check_repository(name, repository)
    return ImageReference(registry, repository, tag or DEFAULT_TAG, digest)


def _split_registry(path: str) -> tuple[str, str]:
    """A first part with a dot or a port, or `localhost`, is a registry. Anything else is in the default one."""
    first, slash, rest = path.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first):
        registry = DEFAULT_REGISTRY if first in ("index.docker.io", "registry-1.docker.io") else first
    else:
        registry, rest = DEFAULT_REGISTRY, path
    if registry == DEFAULT_REGISTRY and "/" not in rest:
        rest = f"{DEFAULT_NAMESPACE}/{rest}"
    return registry, rest


def _check_repository(name: str, repository: str) -> None:
    if len(repository) > MAX_REPOSITORY_CHARACTERS:
        raise _invalid(name, f"it is longer than {MAX_REPOSITORY_CHARACTERS} characters")
    for component in repository.removeprefix(f"{DEFAULT_NAMESPACE}/").split("/"):
        if not COMPONENT.fullmatch(component):
            reason = f"{component!r} has capital letters" if component.lower() != component else ""
            raise _invalid(name, reason or f"{component!r} cannot be a part of a name")


def _invalid(name: str, reason: str) -> ImageError:
    return ImageError(f"{name!r} is not the name of an image: {reason}", hint=HINT)
