"""Limits, access and server settings as values, and every environment variable that Paddock reads as a setting.

No other module reads `os.environ` for a setting. It declares a `Variable` here and calls its `read` where it needs
the value. `VARIABLES` lists them all. This module does not know what the settings are used for.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

from paddock.errors import ConfigError
from paddock.field_types import check_types
from paddock.limits import MEBIBYTE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ServerMode = Literal["simulation", "production"]
IsolationKind = Literal["thread", "process"]
ValueT = TypeVar("ValueT")

# Metadata of a field of a config class, for the command line (see `paddock.cli.field_options`): `option` False leaves
# it out, `flags` are its names, `choices` and `minimum` narrow its values, `metavar` is how the help calls its value,
# `variable` is read when the option is not given, `unit` multiplies the number, `zero_is_none` reads 0 as None.
NO_OPTION = {"option": False}
ZERO_IS_NO_LIMIT = {"minimum": 0, "zero_is_none": True}


def parse_mode(text: str) -> ServerMode:
    """`simulation` (reset, step and state over HTTP) or `production` (agents only). Raises ConfigError."""
    return _read_as(_mode, "mode", text)


# -- environment variables ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variable(Generic[ValueT]):
    """One environment variable. An empty value counts as not set."""

    name: str
    parse: Callable[[str], ValueT]
    """Makes the value. Raises ValueError with a text that says what to write instead."""
    default: ValueT
    help: str
    also: str | None = None
    """Another variable with the same meaning, read when `name` is not set."""
    secret: bool = False
    """Whether the value must not appear in a message."""

    def read(self, environ: Mapping[str, str] | None = None) -> ValueT:
        """The parsed value, or the default. Raises ConfigError, which names the variable."""
        source = os.environ if environ is None else environ
        for name in (self.name, self.also):
            if name is not None and (text := source.get(name)):
                return _read_as(self.parse, name, text, secret=self.secret)
        return self.default


def _read_as(parse: Callable[[str], ValueT], name: str, text: str, *, secret: bool = False) -> ValueT:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{name} cannot be used" if secret else f"{name} is {text!r}", hint=str(error)) from None


def _mode(text: str) -> ServerMode:
    for mode in get_args(ServerMode):
        if text.lower() == mode:
            return mode  # type: ignore[no-any-return]
    raise ValueError("use simulation or production")


def _folder(text: str) -> Path:
    return Path(text).expanduser()


def _is_true(text: str) -> bool:
    """As OpenEnv reads it: any other text means no."""
    return text.strip().lower() in ("true", "1", "yes")


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("give 1 for yes or 0 for no")
    return text == "1"


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("give a whole number")
    return int(text)


def _rollout_count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_PARALLEL_ROLLOUTS):
        raise ValueError(f"give a whole number from 1 to {MAX_PARALLEL_ROLLOUTS}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError("give seconds above 0")
    return seconds


SIZE_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


def parse_size(text: str) -> int:
    """Bytes from `500MB`, `20GiB` or a plain number. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in SIZE_UNITS:
        raise ValueError("give a size such as 500MB or 20GB")
    return int(float(match[1]) * SIZE_UNITS[match[2]])


def _pairs(text: str) -> dict[str, str]:
    pairs = [entry.partition("=") for entry in text.replace(",", " ").split()]
    if not all(name and equals and value for name, equals, value in pairs):
        raise ValueError("give REGISTRY=URL, several with commas between them")
    return {name: value for name, _, value in pairs}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.replace(",", " ").split())


def _text(name: str, help: str, *, also: str | None = None, secret: bool = False) -> Variable[str | None]:
    return Variable(name, str, None, help, also=also, secret=secret)


def _path(name: str, help: str) -> Variable[Path | None]:
    return Variable(name, _folder, None, help)


MAX_PARALLEL_ROLLOUTS = 1024

# Servers and their clients.
PADDOCK_AUTH_TOKEN = _text("PADDOCK_AUTH_TOKEN", "Bearer token of the server. Clients send it.", secret=True)
PADDOCK_MODE: Variable[ServerMode] = Variable(
    "PADDOCK_MODE", _mode, "simulation", "`simulation`, or `production` without reset and step.", also="OPENENV_MODE"
)
PADDOCK_MAX_SESSIONS: Variable[int | None] = Variable(
    "PADDOCK_MAX_SESSIONS", _count, None, "Sessions at a time.", also="MAX_CONCURRENT_ENVS"
)
PADDOCK_MAX_WAITING: Variable[int | None] = Variable(
    "PADDOCK_MAX_WAITING", _count, None, "Clients that wait for a free session, in each process."
)
PADDOCK_MAX_CONNECTIONS: Variable[int | None] = Variable(
    "PADDOCK_MAX_CONNECTIONS", _count, None, "Open connections, in each process."
)
PADDOCK_FASTPATH = Variable(
    "PADDOCK_FASTPATH", _switch, True, "`0` disables the shortcuts of the server. Only speed changes."
)
ENABLE_WEB_INTERFACE = Variable("ENABLE_WEB_INTERFACE", _is_true, False, "`true` serves the web page too.")
PADDOCK_MCP_TOKEN = _text("PADDOCK_MCP_TOKEN", "Bearer token for the server of an `mcp+http:` target.", secret=True)

# Models.
PADDOCK_MODEL_API_KEY = _text("PADDOCK_MODEL_API_KEY", "API key for the model endpoint.", secret=True)
OPENAI_API_KEY = _text(
    "OPENAI_API_KEY", "API key for the model endpoint, if it is on this machine or uses TLS.", secret=True
)
HF_TOKEN = _text("HF_TOKEN", "Hugging Face token, for `hf-router://` models.", secret=True)
HF_HOME = _path("HF_HOME", "Folder of Hugging Face's tools. Default: `~/.cache/huggingface`.")
TIKTOKEN_ENCODINGS_BASE = _path(
    "TIKTOKEN_ENCODINGS_BASE", "Folder with `o200k_base.tiktoken`, for the renderer gpt-oss in token mode."
)

# Rollouts: where they are stored, and what they run in.
PADDOCK_STORE = _path("PADDOCK_STORE", "Folder of the rollout store.")
PADDOCK_AGENTS = _path("PADDOCK_AGENTS", "Folder for installed agent programs.")
PADDOCK_OPENCODE = _text("PADDOCK_OPENCODE", "An `opencode` program to use instead of a downloaded one.")
PADDOCK_SANDBOX = Variable("PADDOCK_SANDBOX", str, "bwrap", "Sandbox of the served `opencode` environment.")
PADDOCK_UNSAFE = Variable(
    "PADDOCK_UNSAFE",
    _switch,
    False,
    "`1` allows the served `opencode` environment a sandbox without isolation.",
)
PADDOCK_MAX_ROLLOUTS = Variable(
    "PADDOCK_MAX_ROLLOUTS", _rollout_count, 4, "Parallel rollouts of the served `opencode` environment."
)
PADDOCK_DOCKER_IMAGE = _text("PADDOCK_DOCKER_IMAGE", "Image of Docker sandboxes.")
PADDOCK_E2B_TEMPLATE = _text("PADDOCK_E2B_TEMPLATE", "Template of E2B sandboxes.")
DOCKER_HOST = _text("DOCKER_HOST", "Address of the container runtime.")
DOCKER_TLS_VERIFY = _text("DOCKER_TLS_VERIFY", "Any value: use TLS to the container runtime.")
DOCKER_CERT_PATH = _path("DOCKER_CERT_PATH", "Folder with ca.pem, cert.pem and key.pem.")
E2B_API_KEY = _text("E2B_API_KEY", "API key of E2B, or of the server that `paddock e2b up` starts.", secret=True)
E2B_API_URL = _text("E2B_API_URL", "Address of the E2B service, read by its SDK.", also="E2B_DOMAIN")

# Images.
PADDOCK_IMAGES = _path("PADDOCK_IMAGES", "Folder of the image store.")
PADDOCK_IMAGE_CACHE_LIMIT = Variable(
    "PADDOCK_IMAGE_CACHE_LIMIT",
    parse_size,
    100 * 10**9,
    "Size of the image store above which pulled and built images that were not used recently are removed.",
)
PADDOCK_IMAGE_LAYER_LIMIT = Variable(
    "PADDOCK_IMAGE_LAYER_LIMIT", parse_size, 32 * 10**9, "Size above which a layer is refused."
)
PADDOCK_IMAGE_MIRRORS: Variable[Mapping[str, str]] = Variable(
    "PADDOCK_IMAGE_MIRRORS", _pairs, {}, "Where images of a registry are fetched from, as `REGISTRY=URL,…`."
)
PADDOCK_IMAGE_INSECURE: Variable[frozenset[str]] = Variable(
    "PADDOCK_IMAGE_INSECURE", _names, frozenset(), "Registries that are used without TLS, as `HOST:PORT,…`."
)
DOCKER_CONFIG = _path("DOCKER_CONFIG", "Folder with the `config.json` that has the logins of registries.")

# Task sets.
PADDOCK_TASKS = _path("PADDOCK_TASKS", "Folder for fetched task sets.")
PADDOCK_TASK_REGISTRY = _text(
    "PADDOCK_TASK_REGISTRY", "File, URL or `git+URL` of the registry in which datasets are looked up by name."
)
PADDOCK_PACKAGE_STORE = _text(
    "PADDOCK_PACKAGE_STORE", "URL of the Harbor package store that has `ORG/NAME@REF`.", also="HARBOR_SUPABASE_URL"
)
PADDOCK_PACKAGE_STORE_KEY = _text(
    "PADDOCK_PACKAGE_STORE_KEY",
    "Public key of the package store.",
    also="HARBOR_SUPABASE_PUBLISHABLE_KEY",
    secret=True,
)
HARBOR_API_KEY = _text("HARBOR_API_KEY", "Harbor's API key, for private packages.", secret=True)
PADDOCK_SWEBENCH_PYTHON = _path("PADDOCK_SWEBENCH_PYTHON", "A Python that has the `swebench` package.")

# Package registries, proxies and certificates of this machine. Sandboxes with a network get what is no secret.
PIP_CONFIG_FILE = _path("PIP_CONFIG_FILE", "Settings of pip.")
PIP_INDEX_URL = _text("PIP_INDEX_URL", "Package index of pip.", secret=True)
PIP_EXTRA_INDEX_URL = _text("PIP_EXTRA_INDEX_URL", "More package indexes of pip.", secret=True)
PIP_TRUSTED_HOST = _text("PIP_TRUSTED_HOST", "Hosts whose certificate pip does not check.")
PIP_CERT = _path("PIP_CERT", "Certificates that pip trusts.")
UV_DEFAULT_INDEX = _text("UV_DEFAULT_INDEX", "Package index of uv.", also="UV_INDEX_URL", secret=True)
UV_INDEX = _text("UV_INDEX", "More package indexes of uv.", also="UV_EXTRA_INDEX_URL", secret=True)
UV_CONFIG_FILE = _path("UV_CONFIG_FILE", "Settings of uv.")
NPM_CONFIG_REGISTRY = _text("NPM_CONFIG_REGISTRY", "Registry of npm.", also="npm_config_registry", secret=True)
NPM_CONFIG_USERCONFIG = _path("NPM_CONFIG_USERCONFIG", "Settings of npm. Default: `~/.npmrc`.")
SSL_CERT_FILE = _path("SSL_CERT_FILE", "Certificates that programs trust.")
REQUESTS_CA_BUNDLE = _path("REQUESTS_CA_BUNDLE", "Certificates that Python programs trust.")
CURL_CA_BUNDLE = _path("CURL_CA_BUNDLE", "Certificates that curl trusts.")
NODE_EXTRA_CA_CERTS = _path("NODE_EXTRA_CA_CERTS", "Certificates that Node trusts beside its own.")
HTTP_PROXY = _text("http_proxy", "Proxy of this machine for http.", also="HTTP_PROXY", secret=True)
HTTPS_PROXY = _text("https_proxy", "Proxy of this machine for https.", also="HTTPS_PROXY", secret=True)
NO_PROXY = Variable("no_proxy", str, "", "Hosts that are reached without the proxy.", also="NO_PROXY")

# Fleet.
FLEET_API_KEY = _text("FLEET_API_KEY", "API key of the control plane.", secret=True)
FLEET_BASE_URL = _text("FLEET_BASE_URL", "Address of the control plane.")
FLEET_CALL_TOOL_DEADLINE_S = Variable(
    "FLEET_CALL_TOOL_DEADLINE_S", _seconds, 90.0, "Seconds that a tool call may take, retries included."
)
FLEET_TRACE_BASE_URL = _text("FLEET_TRACE_BASE_URL", "Address for jobs and traces. Default: FLEET_BASE_URL.")
FLEET_TRACE_JOBS_BASE_URL = _text("FLEET_TRACE_JOBS_BASE_URL", "Address for jobs only.")
FLEET_TRACE_INGEST_BASE_URL = _text("FLEET_TRACE_INGEST_BASE_URL", "Address for traces only.")
PADDOCK_FLEET = _path("PADDOCK_FLEET", "State folder of a control plane on this machine.")
PADDOCK_FLEET_LEASES = _path("PADDOCK_FLEET_LEASES", "Folder where clients record the instances they hold.")

# Ray, the terminal, and the user's folders.
RAY_ADDRESS = _text("RAY_ADDRESS", "Address of the Ray cluster.")
RAY_RECONNECT_SECONDS = Variable(
    "RAY_gcs_rpc_server_reconnect_timeout_s",
    _seconds,
    60.0,
    "Seconds until Ray ends a process without its head.",
)
NO_COLOR = _text("NO_COLOR", "Any value: print without colours.")
XDG_CACHE_HOME = _path("XDG_CACHE_HOME", "Folder for caches. Default: `~/.cache`.")
XDG_CONFIG_HOME = _path("XDG_CONFIG_HOME", "Folder for settings. Default: `~/.config`.")
XDG_DATA_HOME = _path("XDG_DATA_HOME", "Folder for data. Default: `~/.local/share`.")

VARIABLES: tuple[Variable[Any], ...] = tuple(value for value in globals().values() if isinstance(value, Variable))


# -- folders -----------------------------------------------------------------------------------------


def user_data_folder() -> Path:
    """Paddock's folder for data that must be kept."""
    return (XDG_DATA_HOME.read() or Path.home() / ".local/share") / "paddock"


def user_cache_folder() -> Path:
    """Paddock's folder for files that can be fetched again."""
    return (XDG_CACHE_HOME.read() or Path.home() / ".cache") / "paddock"


def hugging_face_folder() -> Path:
    """The folder that Hugging Face's tools share. `hub` in it has what they downloaded."""
    return HF_HOME.read() or (XDG_CACHE_HOME.read() or Path.home() / ".cache") / "huggingface"


# -- what a server grants, as values -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """What one server grants. Times are in seconds; None means no limit."""

    max_sessions: int = field(default=1, metadata={"minimum": 1, "variable": PADDOCK_MAX_SESSIONS})
    """Sessions at a time."""
    queue_timeout: float = field(default=0.0, metadata={"minimum": 0})
    """Seconds that a client waits when the server is full. 0 refuses it at once."""
    max_waiting: int = field(default=10_000, metadata={"minimum": 1, "variable": PADDOCK_MAX_WAITING})
    """Clients that may wait for a session, in each process. More are refused at once."""
    max_waiting_per_connection: int = field(default=1000, metadata=NO_OPTION)
    """How many sessions of one connection may wait for a slot."""
    session_timeout: float | None = field(default=1800.0, metadata=ZERO_IS_NO_LIMIT)
    """Seconds until a session without a socket and without a request is closed."""
    resume_window: float = field(default=60.0, metadata={"minimum": 0})
    """Seconds that a session waits for a client whose socket dropped."""
    give_way_after: float = field(default=5.0, metadata=NO_OPTION)
    """When the server is full, a session whose socket dropped this long ago makes room."""
    step_timeout: float | None = field(default=300.0, metadata=ZERO_IS_NO_LIMIT)
    """Seconds that a reset, step, state or tool call may take, unless the request asks for less."""
    drain_grace: float = field(default=10.0, metadata={"minimum": 0})
    """Seconds that running steps may go on after SIGTERM."""
    message_bytes: int = field(
        default=100 * MEBIBYTE,
        metadata={"flags": ("--max-message-mb",), "minimum": 1, "unit": MEBIBYTE, "metavar": "MIB"},
    )
    """Size of the largest message."""
    threads: int = field(default=80, metadata={"minimum": 1})
    """Threads that run sync environments."""
    ping_interval: float = field(default=20.0, metadata=NO_OPTION)
    ping_timeout: float = field(default=20.0, metadata=NO_OPTION)
    header_timeout: float = field(default=20.0, metadata=NO_OPTION)
    """The head of a request, or of a handshake, has to be complete after this long."""
    body_timeout: float = field(default=30.0, metadata=NO_OPTION)
    """How long a body may take, beside a second for every 8 KiB of it, and a vector until it opens a session."""
    max_connections: int | None = field(default=None, metadata={"minimum": 1, "variable": PADDOCK_MAX_CONNECTIONS})
    """Open connections, in each process. Default: the system's limit of descriptors, less a reserve."""
    unread_timeout: float = field(default=60.0, metadata=NO_OPTION)
    """A peer that reads nothing of what waits for it is disconnected after this long."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.max_sessions < 1:
            raise ConfigError(f"max_sessions is {self.max_sessions}", hint="allow at least one session")
        for name in ("session_timeout", "step_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}", hint="give seconds above 0, or None for no limit")
        for name in ("queue_timeout", "resume_window", "give_way_after", "drain_grace"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give seconds, 0 or more")
        for name in ("ping_interval", "ping_timeout", "header_timeout", "body_timeout", "unread_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give seconds above 0")
        if self.max_connections is not None and self.max_connections < 1:
            raise ConfigError(f"max_connections is {self.max_connections}", hint="give at least 1, or None")
        for name in ("max_waiting", "max_waiting_per_connection", "message_bytes", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give at least 1")


@dataclass(frozen=True, slots=True)
class ConcurrencyConfig:
    """OpenEnv's form of the two limits it knows; `create_app` takes it."""

    max_concurrent_envs: int = 1
    session_timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """Who may talk to the server."""

    token: str | None = field(
        default=None, repr=False, metadata={"flags": ("--auth-token",), "variable": PADDOCK_AUTH_TOKEN}
    )
    """Bearer token that every request must carry. Without one, everybody on this machine may connect."""
    hosts: frozenset[str] = field(default=frozenset(), metadata={"flags": ("--allow-host",)})
    """A name of this server in the Host header, beside the loopback names.

    Empty with a token: any."""
    origins: frozenset[str] = field(default=frozenset(), metadata={"flags": ("--allow-origin",)})
    """A browser origin that may connect, beside our own."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.token is not None and not self.token.strip():
            raise ConfigError("the token is blank", hint="give --auth-token or PADDOCK_AUTH_TOKEN a word, or neither")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All that `create_app` decides, in one value."""

    limits: Limits = field(default_factory=Limits)
    access: Access = field(default_factory=Access)
    mode: ServerMode = field(
        default="simulation", metadata={"choices": get_args(ServerMode), "variable": PADDOCK_MODE}
    )
    """production: agents get no HTTP reset, step and state."""
    isolation: IsolationKind | None = field(default=None, metadata={"choices": get_args(IsolationKind)})
    """process: sessions run in child processes. Default: what the class declares, or thread."""
    sessions_per_process: int | None = field(default=None, metadata={"minimum": 1})
    """With child processes: sessions that share one. Default: what the class declares, or 1."""
    find_environment: Callable[[], Any] | None = field(default=None, repr=False, metadata=NO_OPTION)
    """Finds the class or factory in a child process, where that cannot import it by its name."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.isolation not in (None, *get_args(IsolationKind)):
            raise ConfigError(f"isolation is {self.isolation!r}", hint="give 'thread' or 'process'")
        if self.sessions_per_process is not None and self.sessions_per_process < 1:
            raise ConfigError(f"sessions_per_process is {self.sessions_per_process}", hint="give at least 1")


def user_config_folder() -> Path:
    """The folder in which programs keep the user's settings."""
    return XDG_CONFIG_HOME.read() or Path.home() / ".config"
