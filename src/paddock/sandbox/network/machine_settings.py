"""Package registries and certificates that this machine is configured for, as its own tools read them.

Reads files and variables only; `registries` also asks the tools. Addresses lose their credentials here: those stay on
the host, so a registry that needs some answers 401 inside. Registries in folders of the host are left out.
"""

from __future__ import annotations

import configparser
import logging
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from paddock import config

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

logger = logging.getLogger(__name__)

DEFAULT_PORTS = {"http": 80, "https": 443}
APT_FOLDER = Path("/etc/apt")
APT_LINE = re.compile(r"^deb(?:-src)?\s+(?:\[[^]]*\]\s+)?(\S+)", re.MULTILINE)
APT_FIELD = re.compile(r"^URIs:((?:.*)(?:\n[ \t]+.*)*)", re.MULTILINE | re.IGNORECASE)
SYSTEM_BUNDLES = (
    Path("/etc/ssl/certs/ca-certificates.crt"),
    Path("/etc/pki/tls/certs/ca-bundle.crt"),
    Path("/etc/ssl/ca-bundle.pem"),
    Path("/etc/ssl/cert.pem"),
)
OWN_AUTHORITIES = (Path("/usr/local/share/ca-certificates"), Path("/etc/pki/ca-trust/source/anchors"))
"""Where an administrator puts certificate authorities that the system trusts beside the usual ones."""


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """Addresses are without credentials. Empty: the tool's own default."""

    pip_index: str = ""
    pip_extra_indexes: tuple[str, ...] = ()
    pip_trusted_hosts: tuple[str, ...] = ()
    uv_index: str = ""
    uv_extra_indexes: tuple[str, ...] = ()
    npm_registry: str = ""
    npm_scopes: tuple[tuple[str, str], ...] = ()
    """Registries of single scopes, such as `@team`."""
    apt_urls: tuple[str, ...] = ()
    certificates: Path | None = None
    """A bundle that replaces what programs trust by themselves. None: they need none."""
    extra_certificates: Path | None = None
    """Certificates that Node trusts beside its own."""

    @property
    def python_indexes(self) -> tuple[str, ...]:
        urls = (self.pip_index, *self.pip_extra_indexes, self.uv_index, *self.uv_extra_indexes)
        return tuple(dict.fromkeys(url for url in urls if url))

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of all registries that are configured."""
        scopes = (url for _, url in self.npm_scopes)
        return tuple(
            dict.fromkeys(url for url in (*self.python_indexes, self.npm_registry, *scopes, *self.apt_urls) if url)
        )


def read_machine_settings() -> MachineSettings:
    """What cannot be read is logged and left out. Blocks for as long as it takes to read a few small files."""
    pip = _read_pip()
    uv = _read_uv()
    npm = _read_npm()
    uv_index = config.UV_DEFAULT_INDEX.read() or uv["default"]
    pip_index = config.PIP_INDEX_URL.read() or pip.get("index-url", "")
    return MachineSettings(
        pip_index=next(_public_urls([pip_index]), ""),
        pip_extra_indexes=_split_urls(config.PIP_EXTRA_INDEX_URL.read() or pip.get("extra-index-url", "")),
        pip_trusted_hosts=tuple((config.PIP_TRUSTED_HOST.read() or pip.get("trusted-host", "")).split()),
        # Without settings of its own, uv gets those of pip: it would not find the same packages otherwise.
        uv_index=next(_public_urls([uv_index or pip_index]), ""),
        uv_extra_indexes=_split_urls(config.UV_INDEX.read() or " ".join(uv["extra"])),
        npm_registry=next(_public_urls([config.NPM_CONFIG_REGISTRY.read() or npm.get("registry", "")]), ""),
        npm_scopes=tuple(
            (name.removesuffix(":registry"), url)
            for name, value in npm.items()
            if name.startswith("@") and name.endswith(":registry")
            for url in _public_urls([value])
        ),
        apt_urls=tuple(dict.fromkeys(_public_urls(_read_apt()))),
        certificates=_find_certificates(pip.get("cert", ""), npm.get("cafile", "")),
        extra_certificates=_existing(config.NODE_EXTRA_CA_CERTS.read()),
    )


def endpoint_of(url: str) -> tuple[str, int] | None:
    """Host and port of an http or https address; None for any other."""
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError:
        return None
    return (parts.hostname, port) if parts.scheme in DEFAULT_PORTS and parts.hostname else None


def _public_urls(values: Iterable[str]) -> Iterator[str]:
    """Those that are http or https, without credentials, query and fragment."""
    for value in values:
        # uv takes `NAME=URL`, apt takes `mirror+http://…`.
        _, _, text = value.strip().rpartition("=" if "=http" in value else "+" if "+http" in value else "\0")
        if endpoint_of(text) is not None:
            parts = urlsplit(text)
            yield urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _split_urls(text: str) -> tuple[str, ...]:
    return tuple(_public_urls(text.split()))


def _existing(path: Path | None) -> Path | None:
    return path if path is not None and path.is_file() else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        logger.warning("the settings in %s cannot be read: %s", path, error.strerror)
        return ""


# -- the tools ----------------------------------------------------------------------------------------


def _read_pip() -> dict[str, str]:
    """pip's settings: a later file replaces an earlier one, and `install` replaces `global`."""
    own = config.PIP_CONFIG_FILE.read()
    places = (
        Path("/etc/xdg/pip/pip.conf"),
        Path("/etc/pip.conf"),
        Path.home() / ".pip/pip.conf",
        config.user_config_folder() / "pip/pip.conf",
        Path(sys.prefix, "pip.conf"),
        *([] if own is None else [own]),
    )
    values: dict[str, str] = {}
    for path in [] if own == Path("/dev/null") else places:
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(_read_text(path), source=str(path))
        except configparser.Error as error:
            logger.warning("the settings in %s cannot be read: %s", path, error)
            continue
        for section in ("global", "install"):
            if parser.has_section(section):
                values |= {name.replace("_", "-"): value for name, value in parser.items(section)}
    return values


def _read_uv() -> dict[str, Any]:
    own = config.UV_CONFIG_FILE.read()
    places = (Path("/etc/uv/uv.toml"), config.user_config_folder() / "uv/uv.toml") if own is None else (own,)
    default, extra = "", []
    for path in places:
        try:
            values = tomllib.loads(_read_text(path))
        except tomllib.TOMLDecodeError as error:
            logger.warning("the settings in %s cannot be read: %s", path, error)
            continue
        default = values.get("index-url") or values.get("pip", {}).get("index-url") or default
        extra += values.get("extra-index-url", [])
        for index in values.get("index", []):
            if index.get("default"):
                default = index.get("url", default)
            else:
                extra.append(index.get("url", ""))
    return {"default": default, "extra": extra}


def _read_npm() -> dict[str, str]:
    values: dict[str, str] = {}
    places = (
        Path("/usr/etc/npmrc"),
        Path("/etc/npmrc"),
        config.NPM_CONFIG_USERCONFIG.read() or Path.home() / ".npmrc",
    )
    for path in places:
        for line in _read_text(path).splitlines():
            name, separator, value = line.partition("=")
            if separator and not name.lstrip().startswith((";", "#")):
                values[name.strip()] = value.strip().strip("\"'")
    return values


def _read_apt() -> Iterator[str]:
    for path in (APT_FOLDER / "sources.list", *sorted((APT_FOLDER / "sources.list.d").glob("*.list"))):
        yield from APT_LINE.findall(_read_text(path))
    for path in sorted((APT_FOLDER / "sources.list.d").glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", _read_text(path)):
            if not re.search(r"^Enabled:\s*(no|false)", stanza, re.MULTILINE | re.IGNORECASE):
                for uris in APT_FIELD.findall(stanza):
                    yield from uris.split()


def _find_certificates(*configured: str) -> Path | None:
    """The bundle that a variable or a tool names; else the system's, if its administrator added to it."""
    variables = (config.SSL_CERT_FILE, config.REQUESTS_CA_BUNDLE, config.CURL_CA_BUNDLE, config.PIP_CERT)
    candidates = [*(variable.read() for variable in variables), *(Path(text) for text in configured if text)]
    if any(folder.is_dir() and any(folder.iterdir()) for folder in OWN_AUTHORITIES):
        candidates += SYSTEM_BUNDLES
    return next((path for path in candidates if path is not None and path.is_file()), None)
