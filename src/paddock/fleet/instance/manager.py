"""The management paths of an instance: reset, health, and looking into its databases.

Served under `/api/v1/env` and under `/APP/api/v1/env` for every app name. Where a runner token is set, a request
without it is not admitted.
"""

from __future__ import annotations

import hmac
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from paddock.errors import PaddockError
from paddock.fleet.instance.databases import MODES
from paddock.fleet.instance.differences import Ignored
from paddock.fleet.instance.hosted import FAILURES
from paddock.server.http import JSONBytes, read_body

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paddock.fleet.instance.hosted import HostedEnvironment
    from paddock.fleet.instance.order import Order
    from paddock.fleet.instance.screen import Screen
    from paddock.server.access import Header

    Answer = dict[str, Any] | list[Any]
    Handler = Callable[[Any, str], Awaitable[Answer]]

PLACE = re.compile(r"(?:/[^/]+)?/api/v1/env(?P<rest>/.*|)")
DATABASE = re.compile(r"/resources/sqlite/(?P<name>[^/]+)/(?P<what>describe|query)")
MOST_BODY = 16 * 1024 * 1024
FILE_TEXTS = ("/fs/file/text", "/fs/doc/text", "/fs/doc/metadata", "/fs/doc/structured")
NO_FILES = "this instance has no file system to look at: its state is in its databases"


class NoSuchThing(Exception):
    """Nothing is served there."""


class BadRequest(Exception):
    """The request is wrong; the text says how."""


class NotRunning(Exception):
    """The browser has to be started first. The SDK starts it when it hears a status other than 200."""


class Manager:
    """The ASGI application of the management paths."""

    def __init__(self, order: Order, hosted: HostedEnvironment, screen: Screen | None) -> None:
        self._order = order
        self._hosted = hosted
        self._screen = screen
        self._handlers: dict[tuple[str, str], Handler] = {
            ("POST", "/reset"): self._reset,
            ("GET", "/health"): self._health,
            ("GET", "/resources"): self._resources,
            ("POST", "/diff/structured"): self._diff,
            ("POST", "/diff/fs"): self._file_diff,
            ("POST", "/fs/file"): self._file,
            **{("POST", path): self._no_text for path in FILE_TEXTS},
            ("POST", "/resources/cdp/start"): self._start_browser,
            ("GET", "/resources/cdp/describe"): self._describe_browser,
            ("POST", "/execute_verifier_function"): self._legacy_verifier,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, answer = await self._answer(scope, receive)
        await JSONBytes(answer, status)(scope, receive, send)

    async def _answer(self, scope: Any, receive: Any) -> tuple[int, Any]:
        found = PLACE.fullmatch(scope["path"])
        if found is None:
            return 404, {"detail": "Not Found"}
        path = found["rest"].rstrip("/")
        handler = self._handlers.get((scope["method"], path))
        if handler is None and DATABASE.fullmatch(path):
            handler = self._database
        if handler is None:
            known = {known for _, known in self._handlers}
            return (405, {"detail": "Method Not Allowed"}) if path in known else (404, {"detail": f"no {path} here"})
        try:
            return 200, await handler(await _document(scope, receive), path)
        except NoSuchThing as error:
            return 404, {"detail": str(error)}
        except BadRequest as error:
            return 400, {"detail": str(error)}
        except NotRunning:
            why = "the browser is not running: POST /resources/cdp/start first"
            return 409, {"success": False, **dict.fromkeys(ADDRESSES, ""), "message": why}
        except ClientDisconnect:
            return 400, {"detail": "the request broke off"}

    def admits(self, header: Header) -> bool:
        """Whether the request carries the runner token, where one is set."""
        token = self._order.runner_token
        sent = (header("x-runner-token") or "").encode(errors="replace")
        return token is None or hmac.compare_digest(sent, token.encode())

    # -- the environment ------------------------------------------------------------------------------

    async def _reset(self, body: Any, _: str) -> Answer:
        given = {name: body[name] for name in ("seed", "timestamp") if body.get(name) is not None}
        wrong = [name for name, value in given.items() if not isinstance(value, int) or isinstance(value, bool)]
        if wrong:
            raise BadRequest(f"{', '.join(wrong)} must be an integer")
        try:
            await self._hosted.reset(given)
        except (PaddockError, *FAILURES) as error:
            return {"success": False, "message": f"Reset failed: {error}"}
        if self._screen is not None:
            await self._screen.refresh()
        return {"success": True, "message": "Environment reset to its seed"}

    async def _health(self, _: Any, __: str) -> Answer:
        return {"status": "healthy", "timestamp": datetime.now(UTC).isoformat(), "service": self._order.env_key}

    async def _resources(self, _: Any, __: str) -> Answer:
        found = [] if self._hosted.databases is None else [_resource(name, "sqlite", MODES[name]) for name in MODES]
        return [*found, _resource("cdp", "cdp", "rw")] if self._screen is not None else found

    async def _legacy_verifier(self, _: Any, __: str) -> Answer:
        why = "verifiers are executed by the plane: POST /v1/verifiers/execute there"
        return {"success": False, "result": None, "error": why, "message": why}

    # -- databases ------------------------------------------------------------------------------------

    async def _database(self, body: Any, path: str) -> Answer:
        found = DATABASE.fullmatch(path)
        assert found is not None
        name, what, databases = found["name"], found["what"], self._hosted.databases
        if databases is None or name not in MODES:
            raise NoSuchThing(f"there is no database {name!r}")
        if what == "describe":
            empty = {"resource_name": name, "tables": None}
            return await self._asked(lambda: databases.describe(name), "Describe", empty)
        sql, arguments = body.get("query"), body.get("args")
        if not isinstance(sql, str) or not isinstance(arguments, (list, dict, type(None))):
            raise BadRequest("query must be a string, and args a list")
        read_only = body.get("read_only") is not False
        empty = {"columns": None, "rows": None, "rows_affected": None, "last_insert_id": None}
        return await self._asked(
            lambda: databases.query(name, sql, arguments or (), read_only=read_only), "Query", empty
        )

    async def _diff(self, body: Any, _: str) -> Answer:
        databases = self._hosted.databases
        if databases is None:
            return {"success": True, "message": "this environment has no database", "diff": {}}
        ignored = _ignored(body.get("ignore_config"))

        def compare() -> Answer:
            diff = databases.diff(ignored)
            return {"success": True, "message": "Structured diff generated successfully", "diff": diff, "error": None}

        return await self._asked(compare, "Diff", {"diff": {}})

    async def _asked(self, ask: Callable[[], Answer], what: str, empty: dict[str, Any]) -> Answer:
        try:
            return await self._hosted.ask_databases(ask)
        except FAILURES as error:
            return {"success": False, **empty, "error": str(error), "message": f"{what} failed: {error}"}

    # -- files and browser ----------------------------------------------------------------------------

    async def _file_diff(self, _: Any, __: str) -> Answer:
        nothing = {"files": [], "total_files": 0, "total_size": 0, "source": "none"}
        return {"success": True, **nothing, "message": NO_FILES, "error": None}

    async def _file(self, body: Any, _: str) -> Answer:
        return {"success": True, "path": str(body.get("path") or ""), "exists": False, "message": NO_FILES}

    async def _no_text(self, _: Any, __: str) -> Answer:
        raise BadRequest(NO_FILES)

    async def _start_browser(self, _: Any, __: str) -> Answer:
        if self._screen is None:
            return {"success": False, "message": NO_SCREEN}
        try:
            await self._screen.browser()
        except PaddockError as error:
            return {"success": False, "message": f"{error.message} ({error.hint})" if error.hint else error.message}
        return {"success": True, "message": "The browser is running"}

    async def _describe_browser(self, _: Any, __: str) -> Answer:
        if self._screen is None:
            return {"success": False, **dict.fromkeys(ADDRESSES, ""), "message": NO_SCREEN}
        if self._screen.running is None:
            raise NotRunning
        return {"success": True, **self._screen.running.addresses(), "message": "The browser is running"}


NO_SCREEN = "this image has no browser: make the instance with image_type 'mcp'"
ADDRESSES = ("cdp_page_url", "cdp_browser_url", "cdp_devtools_url")


def _resource(name: str, kind: str, mode: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "mode": mode, "label": None}


def _ignored(given: Any) -> Ignored:
    if not isinstance(given, (dict, type(None))):
        raise BadRequest("ignore_config must be an object")
    config = given or {}
    tables, fields, by_table = (config.get(name) or () for name in ("tables", "fields", "table_fields"))
    try:
        chosen = {table: frozenset(names) for table, names in dict(by_table).items()}
        return Ignored(frozenset(tables), frozenset(fields), chosen)
    except (TypeError, ValueError):
        raise BadRequest(
            "ignore_config has lists of names in tables and fields, and lists by table in table_fields"
        ) from None


async def _document(scope: Any, receive: Any) -> dict[str, Any]:
    """The body of a POST; nothing sent is an empty object."""
    if scope["method"] != "POST":
        return {}
    try:
        body = await read_body(receive, MOST_BODY)
        given = from_json(body) if body.strip() else {}
    except PaddockError as error:
        raise BadRequest(error.message) from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise BadRequest("the body must be a JSON object")
    return given
