"""The JSON documents of images, as registries and archives have them, and what we make of them. No IO."""

from __future__ import annotations

import hashlib
import json
import platform as machine
from pathlib import PurePosixPath
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from paddock.errors import ImageError
from paddock.sandbox.images.image import HealthCheck, Image, ImageConfig
from paddock.sandbox.images.reference import DIGEST

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar"
CONFIG_TYPES = ("", OCI_CONFIG, DOCKER_CONFIG)
LAYER_TYPES = tuple(
    ["", *(f"{kind}{end}" for kind in (OCI_LAYER, DOCKER_LAYER) for end in ("", "+gzip", "+zstd", ".gzip", ".zstd"))]
)
LAYER_FAULTS = {"encrypted": "encrypted", "foreign": "not in the registry", "nondistributable": "not in the registry"}
"""By a word in the media type."""
MANIFEST_TYPES = (OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_INDEX)
NANOSECONDS = 10**9
MAX_LAYERS = 500
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}
FIXED_CREATION = "1970-01-01T00:00:00Z"
DocumentT = TypeVar("DocumentT", bound=BaseModel)


class OciDocument(BaseModel):
    model_config = ConfigDict(extra="ignore", populate_by_name=True)


class OciPlatform(OciDocument):
    os: str = "linux"
    architecture: str = ""
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.os}/{self.architecture}" + (f"/{self.variant}" if self.variant else "")


class Descriptor(OciDocument):
    """Names a blob by its digest."""

    media_type: str = Field("", alias="mediaType")
    digest: str = Field(pattern=f"^{DIGEST.pattern}$")
    size: int = Field(ge=0)
    platform: OciPlatform | None = None
    annotations: dict[str, str] | None = None


class OciManifest(OciDocument):
    """Names the config and the layers of one image."""

    config: Descriptor
    layers: list[Descriptor] = Field(max_length=MAX_LAYERS)


class OciIndex(OciDocument):
    """Names the manifests of one image for several platforms."""

    manifests: list[Descriptor]


class ContainerSettings(OciDocument):
    """`config` in an image's config."""

    env: list[str] | None = Field(None, alias="Env")
    workdir: str | None = Field(None, alias="WorkingDir")
    user: str | None = Field(None, alias="User")
    entrypoint: list[str] | None = Field(None, alias="Entrypoint")
    cmd: list[str] | None = Field(None, alias="Cmd")
    shell: list[str] | None = Field(None, alias="Shell")
    labels: dict[str, str] | None = Field(None, alias="Labels")
    exposed_ports: dict[str, Any] | None = Field(None, alias="ExposedPorts")
    volumes: dict[str, Any] | None = Field(None, alias="Volumes")
    health_check: dict[str, Any] | None = Field(None, alias="Healthcheck")
    on_build: list[str] | None = Field(None, alias="OnBuild")

    @field_validator("entrypoint", "cmd", "shell", mode="before")
    @classmethod
    def _split_string(cls, value: Any) -> Any:
        return ["/bin/sh", "-c", value] if isinstance(value, str) and value else value or None


class RootFilesystem(OciDocument):
    diff_ids: list[str] = Field(max_length=MAX_LAYERS)


class OciConfig(OciDocument):
    """What an image's config blob says."""

    architecture: str = "amd64"
    os: str = "linux"
    variant: str = ""
    config: ContainerSettings | None = None
    rootfs: RootFilesystem

    @property
    def platform(self) -> str:
        return str(OciPlatform(os=self.os, architecture=self.architecture, variant=self.variant))


def parse_document(model: type[DocumentT], content: bytes | str, what: str) -> DocumentT:
    """Raises ImageError that names the wrong field."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ImageError(f"{what}: {field}: {first['msg']}", hint="the image is damaged; fetch it again") from error


def load_json(content: bytes) -> Any:
    """A document from an untrusted source; None if it is not JSON, or nested too deeply."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def this_platform() -> str:
    """`linux/amd64` on most machines."""
    name = machine.machine().lower()
    return f"linux/{ARCHITECTURES.get(name, name)}"


def is_for_platform(platform: str, wanted: str) -> bool:
    """Whether `platform` is the one that is wanted. `linux/arm64` has any variant."""
    words = wanted.split("/")
    return platform.split("/")[: len(words)] == words


def select_manifest(index: OciIndex, platform: str, name: str) -> Descriptor:
    """The manifest for a platform. Raises ImageError that lists the platforms if there is none."""
    candidates = [(str(one.platform or OciPlatform()), one) for one in index.manifests]
    for text, descriptor in candidates:
        if is_for_platform(text, platform):
            return descriptor
    if len(index.manifests) == 1 and index.manifests[0].platform is None:
        return index.manifests[0]
    offered = sorted({text for text, _ in candidates if not text.startswith("unknown")})
    raise ImageError(f"{name} has no image for {platform}", hint=f"it has {', '.join(offered) or 'none'}")


def check_manifest_keys(document: dict[str, Any], name: str) -> None:
    """Raises ImageError that names the kind of a manifest which is not that of an image."""
    if "layers" in document and "config" in document:
        return
    if document.get("schemaVersion") == 1:
        raise ImageError(f"the manifest of {name} is of schema 1, which is too old", hint="push the image again")
    kind = str(document.get("mediaType") or "an unknown kind")[:200]
    raise ImageError(f"the manifest of {name} is of {kind}, not of an image", hint="check the name")


def check_media_types(manifest: OciManifest, name: str) -> None:
    """Raises ImageError for what is no image, such as a chart, and for layers that cannot be fetched or read."""
    kind = manifest.config.media_type
    if kind not in CONFIG_TYPES:
        raise ImageError(f"{name} is no image: its config is {kind[:200]!r}", hint="check the name")
    for kind in (layer.media_type for layer in manifest.layers):
        for word, fault in LAYER_FAULTS.items():
            if word in kind:
                raise ImageError(f"a layer of {name} is {fault} ({kind[:200]})", hint="use another image")
        if kind not in LAYER_TYPES:
            raise ImageError(f"a layer of {name} is of the unknown kind {kind[:200]!r}", hint="use another image")


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def image_from_config(name: str, content: bytes, *, layers: tuple[str, ...] | None = None) -> Image:
    """The image that a config blob describes."""
    document = parse_document(OciConfig, content, f"the config of {name}")
    settings = document.config or ContainerSettings()
    for diff_id in document.rootfs.diff_ids:
        if not DIGEST.fullmatch(diff_id):
            raise ImageError(f"the config of {name}: rootfs.diff_ids: {diff_id[:80]!r} is not a sha256 digest")
    return Image(
        name=name,
        digest=digest_of(content),
        layers=tuple(document.rootfs.diff_ids) if layers is None else layers,
        config=read_settings(name, settings),
        platform=document.platform,
    )


def make_image(name: str, layers: tuple[str, ...], config: ImageConfig, platform: str | None = None) -> Image:
    """An image of these layers. Equal arguments give the same digest; the name does not count."""
    platform = platform or this_platform()
    return Image(name, digest_of(config_to_json(layers, config, platform)), layers, config, platform)


def config_to_json(layers: tuple[str, ...], config: ImageConfig, platform: str) -> bytes:
    """A config blob."""
    system, architecture, *variant = platform.split("/")
    document = {
        "created": FIXED_CREATION,
        "architecture": architecture,
        "os": system,
        **({"variant": variant[0]} if variant else {}),
        "config": _write_settings(config),
        "rootfs": {"type": "layers", "diff_ids": list(layers)},
        "history": [{"created": FIXED_CREATION, "created_by": "paddock"} for _ in layers],
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def read_settings(name: str, settings: ContainerSettings) -> ImageConfig:
    workdir = PurePosixPath("/", settings.workdir or "/")
    if ".." in workdir.parts:
        raise ImageError(f"the config of {name}: WorkingDir: {settings.workdir!r} has '..' in it")
    pairs = (entry.partition("=") for entry in settings.env or ())
    return ImageConfig(
        env={key: value for key, _, value in pairs if key},
        workdir=workdir,
        user=settings.user or "",
        entrypoint=tuple(settings.entrypoint or ()),
        cmd=tuple(settings.cmd or ()),
        shell=tuple(settings.shell or ImageConfig().shell),
        labels=settings.labels or {},
        exposed_ports=tuple(settings.exposed_ports or ()),
        volumes=tuple(settings.volumes or ()),
        health_check=_read_health_check(name, settings.health_check),
        on_build=tuple(settings.on_build or ()),
    )


def _read_health_check(name: str, document: dict[str, Any] | None) -> HealthCheck | None:
    test = (document or {}).get("Test") or []
    if not document or not test or test[0] == "NONE":
        return None
    if not all(isinstance(word, str) for word in test):
        raise ImageError(f"the config of {name}: Healthcheck.Test: {test!r} is not a list of words")
    argv = ("/bin/sh", "-c", *test[1:]) if test[0] == "CMD-SHELL" else tuple(test[1:])
    default = HealthCheck(argv)

    def seconds(key: str, otherwise: float) -> float:
        value = document.get(key)
        return value / NANOSECONDS if isinstance(value, int) and value > 0 else otherwise

    retries = document.get("Retries")
    return HealthCheck(
        argv,
        interval=seconds("Interval", default.interval),
        timeout=seconds("Timeout", default.timeout),
        start_period=seconds("StartPeriod", default.start_period),
        start_interval=seconds("StartInterval", default.start_interval),
        retries=retries if isinstance(retries, int) and retries > 0 else default.retries,
    )


def _write_settings(config: ImageConfig) -> dict[str, Any]:
    document: dict[str, Any] = {
        "Env": [f"{key}={value}" for key, value in config.env.items()],
        "WorkingDir": str(config.workdir),
        "User": config.user,
        "Entrypoint": list(config.entrypoint) or None,
        "Cmd": list(config.cmd) or None,
        "Shell": list(config.shell) if config.shell != ImageConfig().shell else None,
        "Labels": dict(config.labels) or None,
        "ExposedPorts": {port: {} for port in config.exposed_ports} or None,
        "Volumes": {path: {} for path in config.volumes} or None,
        "Healthcheck": _write_health_check(config.health_check),
        "OnBuild": list(config.on_build) or None,
    }
    return {key: value for key, value in document.items() if value}


def _write_health_check(check: HealthCheck | None) -> dict[str, Any] | None:
    if check is None:
        return None
    return {
        "Test": ["CMD", *check.argv],
        "Interval": int(check.interval * NANOSECONDS),
        "Timeout": int(check.timeout * NANOSECONDS),
        "StartPeriod": int(check.start_period * NANOSECONDS),
        "StartInterval": int(check.start_interval * NANOSECONDS),
        "Retries": check.retries,
    }
