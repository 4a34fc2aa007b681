"""The hosts that `registries` stands for: those of the package registries that this machine is configured for.

They come from the settings of pip, uv, npm and apt. Where a tool has no setting, the tool itself is asked for its
default. A Python index may name another host for the files: the index is asked for it. No host name is in this code.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urljoin

from paddock.loopback import is_loopback
from paddock.sandbox.network.machine_settings import MachineSettings, endpoint_of, read_machine_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

PROGRAM_SECONDS = 20.0
INDEX_SECONDS = 15.0
MOST_PAGE_BYTES = 8 * 1024 * 1024
RETRY_SECONDS = 60.0
"""After this long, an index that did not answer is asked again."""
SAMPLE_PROJECT = "pip"
"""A project that every Python index has, to learn where it keeps files."""
PAGE_TYPES = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
WEB_PORTS = (80, 443)
QUESTION_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paddock-registries")
DEFAULT_INDEX = re.compile(r"\(?by\s+default:\s*<?|\(default\s+")
URL = re.compile(r"https?://[^\s)>\"']+")
LINK = re.compile(r"<a\s[^>]*href=[\"']([^\"'#]+)", re.IGNORECASE)

Endpoint = tuple[str, int]


class Registries:
    """Answers whether a host is a package registry of this machine. Slow questions are asked once, when needed."""

    def __init__(
        self,
        settings: MachineSettings,
        *,
        find_more: Callable[[MachineSettings], tuple[set[Endpoint], bool]] | None = None,
    ) -> None:
        """`find_more` returns what the tools and indexes say, and whether all answered. It runs in a thread."""
        self.settings = settings
        self._find_more = find_more or ask_tools
        self._configured = set(_endpoints(settings.urls))
        self._more: set[Endpoint] = set()
        self._is_complete = False
        self._asking: Future[None] | None = None
        self._due_at = 0.0
        """When those that did not answer are asked again."""
        self._lock = threading.Lock()

    @property
    def loopback_ports(self) -> tuple[int, ...]:
        """Ports of registries on the loopback interface of this machine."""
        return tuple(sorted({port for host, port in self._configured if is_loopback(host)}))

    async def contains(self, host: str, port: int) -> bool:
        if self._match(self._configured, host, port) or (is_loopback(host) and port in self.loopback_ports):
            return True
        if not self._is_complete:
            await asyncio.shield(asyncio.wrap_future(self._ask_once()))
        return self._match(self._more, host, port)

    def _ask_once(self) -> Future[None]:
        """All sandboxes wait for the same questions, without a thread for each. Their event loops may differ."""
        with self._lock:
            if self._asking is None or (self._asking.done() and time.monotonic() > self._due_at):
                self._asking = QUESTION_THREAD.submit(self._ask)
            return self._asking

    def _ask(self) -> None:
        self._more, self._is_complete = self._find_more(self.settings)
        self._due_at = time.monotonic() + RETRY_SECONDS

    @staticmethod
    def _match(endpoints: set[Endpoint], host: str, port: int) -> bool:
        """A registry at a usual port is reached at both: at 80 it may only redirect."""
        if port in WEB_PORTS:
            return any((host, usual) in endpoints for usual in WEB_PORTS)
        return (host, port) in endpoints


@cache
def machine_registries() -> Registries:
    """Those of this process. Its settings are read once."""
    return Registries(read_machine_settings())


def _endpoints(urls: Iterable[str]) -> Iterator[Endpoint]:
    return (endpoint for url in urls if (endpoint := endpoint_of(url)) is not None)


# -- asking -------------------------------------------------------------------------------------------


def ask_tools(settings: MachineSettings) -> tuple[set[Endpoint], bool]:
    """Hosts beyond the settings, and whether everybody answered. Blocks for up to a minute."""
    defaults: list[str] = []
    if not settings.pip_index or not settings.uv_index:
        defaults += _ask_pip()
    if not settings.npm_registry:
        defaults += _ask_npm()
    endpoints = set(_endpoints(defaults))
    is_complete = True
    for index in dict.fromkeys((*settings.python_indexes, *(url for url in defaults if "/simple" in url))):
        try:
            endpoints.update(_endpoints(_file_urls(index, settings.certificates)))
        except (OSError, ValueError) as error:
            logger.warning("the package index %s does not tell where its files are: %s", index, error)
            is_complete = False
    return endpoints, is_complete


def _ask_pip() -> list[str]:
    """The default index, from the help of pip, or of uv."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"
    commands = (
        [sys.executable, "-m", "pip", "download", "--help"],
        [shutil.which("pip3") or "pip", "download", "--help"],
        ["/usr/bin/python3", "-m", "pip", "download", "--help"],
        [uv, "pip", "install", "--help"],
    )
    for command in commands:
        text = " ".join(_run(command).split())
        if (start := DEFAULT_INDEX.search(text)) and (url := URL.match(text, start.end())):
            return [url[0]]
    return []


def _ask_npm() -> list[str]:
    npm = shutil.which("npm")
    return URL.findall(_run([npm, "config", "get", "registry"])) if npm else []


def _run(command: Sequence[str]) -> str:
    """What a program prints; nothing if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _file_urls(index: str, certificates: Path | None) -> set[str]:
    """Where an index says the files of a project are."""
    page = urljoin(index.rstrip("/") + "/", f"{SAMPLE_PROJECT}/")
    context = ssl.create_default_context(cafile=None if certificates is None else str(certificates))
    request = urllib.request.Request(page, headers={"Accept": PAGE_TYPES})
    with urllib.request.urlopen(request, timeout=INDEX_SECONDS, context=context) as answer:
        text = answer.read(MOST_PAGE_BYTES).decode(errors="replace")
        is_json = "json" in (answer.headers.get_content_type() or "")
    links = [file["url"] for file in json.loads(text).get("files", [])] if is_json else LINK.findall(text)
    return {urljoin(page, link) for link in links}
