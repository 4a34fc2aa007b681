"""Logins of registries, as `docker login` stores them: in `config.json`, or in a helper program that it names."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddock.config import DOCKER_CONFIG
from paddock.errors import ImageError
from paddock.sandbox.images.reference import DEFAULT_REGISTRY

HELPER_SECONDS = 20.0
HELPER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
DEFAULT_REGISTRY_KEY = "https://index.docker.io/v1/"
"""Under which `docker login` stores the login of the default registry."""
PREFIXES, SUFFIXES = ("", "https://", "http://"), ("", "/", "/v1/", "/v2/")
"""Of a registry's key, which programs write in different ways."""
TOKEN_USER = "<token>"
"""The user name that a helper gives for an identity token."""


@dataclass(frozen=True, slots=True)
class Login:
    """Who we are for a registry. Empty: anonymous."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        """The value of an Authorization header, or nothing."""
        if not self.user:
            return ""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


ANONYMOUS = Login()


async def find_login(registry: str) -> Login:
    """The login for a registry (`HOST[:PORT]`). Raises ImageError if the settings cannot be read."""
    path = (DOCKER_CONFIG.read() or Path.home() / ".docker") / "config.json"
    document = await asyncio.to_thread(_read_config, path)
    keys = [DEFAULT_REGISTRY_KEY] if registry == DEFAULT_REGISTRY else [registry]
    helpers = _read_table(document, "credHelpers", path)
    for key in (registry, *keys):
        if helper := helpers.get(key) or document.get("credsStore"):
            login = await _ask_helper(str(helper), keys[0])
            if login is not None:
                return login
    auths = _read_table(document, "auths", path)
    for key in (prefix + key + suffix for key in keys for prefix in PREFIXES for suffix in SUFFIXES):
        if isinstance(entry := auths.get(key), dict):
            return _parse_entry(entry, path, key)
    return ANONYMOUS


def _read_table(document: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    table = document.get(key) or {}
    if not isinstance(table, dict):
        raise ImageError(f"{path}: {key} is not a table", hint="log in again, or remove the file")
    return table


def _read_config(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        # The text of a JSON error has a position only, no content of the file.
        raise ImageError(f"{path} cannot be read: {error}", hint="log in again, or remove the file") from None
    return document if isinstance(document, dict) else {}


def _parse_entry(entry: dict[str, Any], path: Path, key: str) -> Login:
    token = str(entry.get("identitytoken") or "")
    user, password = str(entry.get("username") or ""), str(entry.get("password") or "")
    if entry.get("auth"):
        try:
            user, _, password = base64.b64decode(str(entry["auth"]), validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            raise ImageError(f"{path}: auths.{key}.auth is not base64", hint="log in again") from None
    return Login(user, password.rstrip("\0"), token)


async def _ask_helper(name: str, key: str) -> Login | None:
    """What the program `docker-credential-NAME` has for a registry; None if it has nothing."""
    program = shutil.which(f"docker-credential-{name}") if HELPER_NAME.fullmatch(name) else None
    if program is None:
        raise ImageError(f"docker-credential-{name} is not installed", hint="config.json names it: install it")
    process = await asyncio.create_subprocess_exec(
        program,
        "get",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(HELPER_SECONDS):
            output, _ = await process.communicate(key.encode())
    except TimeoutError:
        raise ImageError(f"docker-credential-{name} did not answer in {HELPER_SECONDS:g} s", hint="run it") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        return None
    try:
        document = json.loads(output)
        user, secret = str(document["Username"]), str(document["Secret"])
    except (ValueError, KeyError, TypeError):
        raise ImageError(f"docker-credential-{name} gave no login that can be read", hint="log in again") from None
    return Login(identity_token=secret) if user == TOKEN_USER else Login(user, secret)
