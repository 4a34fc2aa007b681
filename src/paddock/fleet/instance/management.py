"""The management API of an instance: reset, health, database queries, the browser's addresses.

Served under `/api/v1/env` and under `/APP/api/v1/env` for every app name. `paddock.fleet.instance.app` calls `admits`
first: where a runner token is set, a request without it gets a 404.
"""

from __future__ import annotations

import hmac
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from paddock.errors import PaddockError
from paddock.fleet.instance.database_diff import DiffIgnore
from paddock.fleet.instance.databases import MODES
from paddock.fleet.instance.environment import DATABASE_ERRORS
from paddock.server.http import JSONBytes, read_body

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paddock.fleet.instance.computer import Computer
    from paddock.fleet.instance.environment import InstanceEnvironment, InstanceSpec
    from paddock.server.access import Header

    Json = dict[str, Any] | list[Any]
    Handler = Callable[[Any, str], Awaitable[Json]]

MANAGEMENT_PATH = re.compile(r"(?:/[^/]+)?/api/v1/env(?P<rest>/.*|)")
DATABASE_PATH = re.compile(r"/resources/sqlite/(?P<name>[^/]+)/(?P<operation>describe|query)")
MAX_BODY_BYTES = 16 * 1024 * 1024
FILE_TEXT_PATHS = ("/fs/file/text", "/fs/doc/text", "/fs/doc/metadata", "/fs/doc/structured")
NO_FILES = "this instance has no file system to look at: its state is in its databases"


class ResourceNotFound(Exception):
    """There is no such resource: 404."""


class InvalidRequest(Exception):
    """The request is wrong, and the text says how: 400."""


class BrowserNotRunning(Exception):
    """The browser must be started first: 409. The SDK starts it when the status is not 200."""


class ManagementApi:
    """The ASGI application of the management paths."""

    def __init__(self, spec: InstanceSpec, environment: InstanceEnvironment, computer: Computer | None) -> None:
        self._spec = spec
        self._environment = environment
        self._computer = computer
        self._handlers: dict[tuple[str, str], Handler] = {
            ("POST", "/reset"): self._reset,
            ("GET", "/health"): self._health,
            ("GET", "/resources"): self._resources,
            ("POST", "/diff/structured"): self._diff,
            ("POST", "/diff/fs"): self._file_diff,
            ("POST", "/fs/file"): self._file,
            **{("POST", path): self._file_text for path in FILE_TEXT_PATHS},
            ("POST", "/resources/cdp/start"): self._start_browser,
            ("GET", "/resources/cdp/describe"): self._describe_browser,
            ("POST", "/execute_verifier_function"): self._legacy_verifier,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, document = await self._respond(scope, receive)
        await JSONBytes(document, status)(scope, receive, send)

    async def _respond(self, scope: Any, receive: Any) -> tuple[int, Any]:
        match = MANAGEMENT_PATH.fullmatch(scope["path"])
        if match is None:
            return 404, {"detail": "Not Found"}
        path = match["rest"].rstrip("/")
        handler = self._handlers.get((scope["method"], path))
        if handler is None and DATABASE_PATH.fullmatch(path):
            handler = self._database
        if handler is None:
            paths = {path for _, path in self._handlers}
            return (405, {"detail": "Method Not Allowed"}) if path in paths else (404, {"detail": f"no {path} here"})
        try:
            return 200, await handler(await _read_document(scope, receive), path)
        except ResourceNotFound as error:
            return 404, {"detail": str(error)}
        except InvalidRequest as error:
            return 400, {"detail": str(error)}
        except BrowserNotRunning:
            why = "the browser is not running: POST /resources/cdp/start first"
            return 409, {"success": False, **dict.fromkeys(BROWSER_ADDRESSES, ""), "message": why}
        except ClientDisconnect:
            return 400, {"detail": "the request body is incomplete"}

    def admits(self, header: Header) -> bool:
        """Whether the request carries the runner token, where one is set."""
        token = self._spec.runner_token
        sent = (header("x-runner-token") or "").encode(errors="replace")
        return token is None or hmac.compare_digest(sent, token.encode())

    # -- the environment ------------------------------------------------------------------------------

    async def _reset(self, body: Any, _: str) -> Json:
        arguments = {name: body[name] for name in ("seed", "timestamp") if body.get(name) is not None}
        wrong = [name for name, value in arguments.items() if not isinstance(value, int) or isinstance(value, bool)]
        if wrong:
            raise InvalidRequest(f"{', '.join(wrong)} must be an integer")
        try:
            await self._environment.reset(arguments)
        except (PaddockError, *DATABASE_ERRORS) as error:
            return {"success": False, "message": f"Reset failed: {error}"}
        if self._computer is not None:
            await self._computer.refresh()
        return {"success": True, "message": "Environment reset to its seed"}

    async def _health(self, _: Any, __: str) -> Json:
        return {"status": "healthy", "timestamp": datetime.now(UTC).isoformat(), "service": self._spec.env_key}

    async def _resources(self, _: Any, __: str) -> Json:
        names = () if self._environment.databases is None else MODES
        databases = [_resource(name, "sqlite", MODES[name]) for name in names]
        return [*databases, _resource("cdp", "cdp", "rw")] if self._computer is not None else databases

    async def _legacy_verifier(self, _: Any, __: str) -> Json:
        error = "verifiers are executed by the plane: POST /v1/verifiers/execute there"
        return {"success": False, "result": None, "error": error, "message": error}

    # -- databases ------------------------------------------------------------------------------------

    async def _database(self, body: Any, path: str) -> Json:
        match = DATABASE_PATH.fullmatch(path)
        assert match is not None
        name, operation, databases = match["name"], match["operation"], self._environment.databases
        if databases is None or name not in MODES:
            raise ResourceNotFound(f"there is no database {name!r}")
        if operation == "describe":
            empty = {"resource_name": name, "tables": None}
            return await self._read(lambda: databases.describe(name), "Describe", empty)
        sql, arguments = body.get("query"), body.get("args")
        if not isinstance(sql, str) or not isinstance(arguments, (list, dict, type(None))):
            raise InvalidRequest("query must be a string, and args a list")
        read_only = body.get("read_only") is not False
        empty = {"columns": None, "rows": None, "rows_affected": None, "last_insert_id": None}
        return await self._read(
            lambda: databases.query(name, sql, arguments or (), read_only=read_only), "Query", empty
        )

    async def _diff(self, body: Any, _: str) -> Json:
        databases = self._environment.databases
        if databases is None:
            return {"success": True, "message": "this environment has no database", "diff": {}}
        ignored = _read_ignored(body.get("ignore_config"))

        def compare() -> Json:
            diff = databases.diff(ignored)
            return {"success": True, "message": "Structured diff generated successfully", "diff": diff, "error": None}

        return await self._read(compare, "Diff", {"diff": {}})

    async def _read(self, work: Callable[[], Json], operation: str, empty: dict[str, Any]) -> Json:
        try:
            return await self._environment.read_databases(work)
        except DATABASE_ERRORS as error:
            return {"success": False, **empty, "error": str(error), "message": f"{operation} failed: {error}"}

    # -- files and browser ----------------------------------------------------------------------------

    async def _file_diff(self, _: Any, __: str) -> Json:
        nothing = {"files": [], "total_files": 0, "total_size": 0, "source": "none"}
        return {"success": True, **nothing, "message": NO_FILES, "error": None}

    async def _file(self, body: Any, _: str) -> Json:
        return {"success": True, "path": str(body.get("path") or ""), "exists": False, "message": NO_FILES}

    async def _file_text(self, _: Any, __: str) -> Json:
        raise InvalidRequest(NO_FILES)

    async def _start_browser(self, _: Any, __: str) -> Json:
        if self._computer is None:
            return {"success": False, "message": NO_SCREEN}
        try:
            await self._computer.browser()
        except PaddockError as error:
            return {"success": False, "message": f"{error.message} ({error.hint})" if error.hint else error.message}
        return {"success": True, "message": "The browser is running"}

    async def _describe_browser(self, _: Any, __: str) -> Json:
        if self._computer is None:
            return {"success": False, **dict.fromkeys(BROWSER_ADDRESSES, ""), "message": NO_SCREEN}
        if self._computer.running is None:
            raise BrowserNotRunning
        return {"success": True, **self._computer.running.addresses(), "message": "The browser is running"}


NO_SCREEN = "this image has no browser: make the instance with image_type 'mcp'"
BROWSER_ADDRESSES = ("cdp_page_url", "cdp_browser_url", "cdp_devtools_url")


def _resource(name: str, kind: str, mode: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "mode": mode, "label": None}


def _read_ignored(config: Any) -> DiffIgnore:
    if not isinstance(config, (dict, type(None))):
        raise InvalidRequest("ignore_config must be an object")
    config = config or {}
    tables, fields, by_table = (config.get(name) or () for name in ("tables", "fields", "table_fields"))
    try:
        table_fields = {table: frozenset(names) for table, names in dict(by_table).items()}
        return DiffIgnore(frozenset(tables), frozenset(fields), table_fields)
    except (TypeError, ValueError):
        raise InvalidRequest(
            "ignore_config has lists of names in tables and fields, and lists by table in table_fields"
        ) from None


async def _read_document(scope: Any, receive: Any) -> dict[str, Any]:
    """The body of a POST; an empty one is an empty object."""
    if scope["method"] != "POST":
        return {}
    try:
        body = await read_body(receive, MAX_BODY_BYTES)
        document = from_json(body) if body.strip() else {}
    except PaddockError as error:
        raise InvalidRequest(error.message) from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object")
    return document
