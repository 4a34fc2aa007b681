"""E2B's control API: sandboxes are created, listed, prolonged and killed. It needs the header `X-API-KEY`."""

from __future__ import annotations

import hmac
import os
import time
import urllib.parse
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from paddock.e2b_server.file_transfer import read_body
from paddock.errors import CapacityReached, ImageError, RequestError, SandboxError
from paddock.limits import MEBIBYTE

if TYPE_CHECKING:
    from paddock.e2b_server.registry import SandboxRegistry
    from paddock.e2b_server.served_sandbox import ServedSandbox

ENVD_VERSION = "0.6.4"
"""The version of E2B's daemon whose features `guest_requests` has."""
CLIENT_ID = "paddock"
MAX_PAGE_ITEMS = 100
UNSUPPORTED_ACTIONS = {
    "pause": "sandboxes cannot be paused here: their memory is that of running processes",
    "resume": "sandboxes cannot be paused here, so there is nothing to resume",
    "fork": "sandboxes cannot be forked here",
    "snapshots": "there are no snapshots here",
    "network": "sandboxes have no network here, so there is none to change",
    "logs": "no logs are stored here: read the output of the commands",
}
UNSUPPORTED_OPTIONS = {
    "autoPause": "sandboxes cannot be paused here: leave out lifecycle.on_timeout",
    "mcp": "there is no MCP gateway here",
    "volumeMounts": "there are no volumes here",
    "iam": "there is no workload identity here",
}


class ControlApi:
    def __init__(self, registry: SandboxRegistry, *, key: str, domain: str) -> None:
        self._registry, self._key, self._domain = registry, key, domain

    def routes(self) -> list[web.RouteDef]:
        one = "/sandboxes/{id}"
        routes = [
            web.post("/v2/sandboxes", self.create),
            web.post("/sandboxes", self.create),
            web.get("/v2/sandboxes", self.list),
            web.get("/sandboxes", self.list),
            web.get("/sandboxes/metrics", self.metrics_of_all),
            web.get("/templates/aliases/{id}", self.show_template),
            web.get(one, self.show),
            web.delete(one, self.kill),
            web.post(f"{one}/timeout", self.set_timeout),
            web.post(f"{one}/refreshes", self.refresh),
            web.post(f"{one}/connect", self.connect),
            web.post(f"/v2{one}/connect", self.connect),
            web.get(f"{one}/metrics", self.metrics),
        ]
        for name in UNSUPPORTED_ACTIONS:
            routes += [web.route("*", f"{one}/{name}", self.refuse), web.route("*", f"/v2{one}/{name}", self.refuse)]
        return routes

    def is_authorized(self, request: web.Request) -> bool:
        return hmac.compare_digest(request.headers.get("X-API-KEY", "").encode(errors="replace"), self._key.encode())

    # -- routes ---------------------------------------------------------------------------------------

    async def create(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        for name, why in UNSUPPORTED_OPTIONS.items():
            if body.get(name):
                return problem(400, why)
        try:
            served = await self._registry.create(
                template=str(body.get("templateID") or "base"),
                seconds=None if body.get("timeout") is None else int(body["timeout"]),
                metadata=string_map(body, "metadata"),
                envs=string_map(body, "envVars"),
            )
        except CapacityReached as error:
            return problem(429, error.message, {"Should-Retry": "false"})
        except ImageError as error:
            return problem(404, f"template {body.get('templateID')!r} not found: {error.message}")
        except (RequestError, ValueError) as error:
            return problem(400, str(error))
        except SandboxError as error:
            return problem(500, f"{error.message}{f' ({error.hint})' if error.hint else ''}")
        return web.json_response(self.describe_access(served), status=201)

    async def show_template(self, request: web.Request) -> web.Response:
        """Whether there is a template of this name: an image is pulled if it is not here yet."""
        name = request.match_info["id"]
        try:
            await self._registry.find_image(name)
        except (ImageError, SandboxError) as error:
            return problem(404, f"template {name!r} not found: {error.message}")
        return web.json_response({"templateID": name, "public": True})

    async def connect(self, request: web.Request) -> web.Response:
        served, body = self._find(request), await json_body(request)
        if served is None:
            return missing(request)
        if body.get("timeout") is not None:
            self._registry.prolong(served, int(body["timeout"]), only_longer=True)
        return web.json_response(self.describe_access(served))

    async def show(self, request: web.Request) -> web.Response:
        served = self._find(request)
        if served is None:
            return missing(request)
        return web.json_response({**self.describe(served), "domain": self._domain, "envdAccessToken": served.token})

    async def list(self, request: web.Request) -> web.Response:
        """By `metadata`, `template` and `startedAfter`; pages of `limit`, in the order of their start."""
        query = request.query
        metadata = {
            urllib.parse.unquote(name): urllib.parse.unquote(value)
            for name, value in urllib.parse.parse_qsl(query.get("metadata", ""))
        }
        sandboxes = [served for served in self._registry.all() if metadata.items() <= served.metadata.items()]
        if "template" in query:
            sandboxes = [served for served in sandboxes if served.template == query["template"]]
        states = ",".join(query.getall("state", [])) or "running"
        if "running" not in states:
            sandboxes = []
        if "startedAfter" in query:
            after = datetime.fromisoformat(query["startedAfter"]).timestamp()
            sandboxes = [served for served in sandboxes if served.started_at > after]
        if query.get("order") == "desc":
            sandboxes.reverse()
        first = int(query.get("nextToken") or 0)
        last = first + min(int(query.get("limit") or MAX_PAGE_ITEMS), MAX_PAGE_ITEMS)
        headers = {"x-next-token": str(last)} if last < len(sandboxes) else {}
        return web.json_response([self.describe(served) for served in sandboxes[first:last]], headers=headers)

    async def kill(self, request: web.Request) -> web.Response:
        was_there = await self._registry.kill(request.match_info["id"])
        return web.Response(status=204) if was_there else missing(request)

    async def set_timeout(self, request: web.Request) -> web.Response:
        served, body = self._find(request), await json_body(request)
        if served is None:
            return missing(request)
        self._registry.prolong(served, int(body["timeout"]))
        return web.Response(status=204)

    async def refresh(self, request: web.Request) -> web.Response:
        served, body = self._find(request), await json_body(request)
        if served is None:
            return missing(request)
        self._registry.prolong(served, int(body.get("duration") or 60), only_longer=True)
        return web.Response(status=204)

    async def metrics(self, request: web.Request) -> web.Response:
        served = self._find(request)
        if served is None:
            return missing(request)
        return web.json_response([await self.measure(served)])

    async def metrics_of_all(self, request: web.Request) -> web.Response:
        ids = ",".join(request.query.getall("sandbox_ids", [])).split(",")
        sandboxes = [served for served in map(self._registry.find, ids) if served is not None]
        return web.json_response({"sandboxes": {served.id: await self.measure(served) for served in sandboxes}})

    async def refuse(self, request: web.Request) -> web.Response:
        if self._find(request) is None:
            return missing(request)
        return problem(501, UNSUPPORTED_ACTIONS[request.path.rpartition("/")[2]])

    # -- bodies of responses --------------------------------------------------------------------------

    def _find(self, request: web.Request) -> ServedSandbox | None:
        return self._registry.find(request.match_info["id"])

    def describe_access(self, served: ServedSandbox) -> dict[str, Any]:
        return {
            "sandboxID": served.id,
            "templateID": served.template,
            "clientID": CLIENT_ID,
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": served.token,
            "domain": self._domain,
        }

    def describe(self, served: ServedSandbox) -> dict[str, Any]:
        limits = self._registry.limits
        return {
            "sandboxID": served.id,
            "templateID": served.template,
            "clientID": CLIENT_ID,
            "envdVersion": ENVD_VERSION,
            "startedAt": iso_time(served.started_at),
            "endAt": iso_time(served.end_at),
            "state": "running",
            "cpuCount": limits.cpus or os.cpu_count() or 1,
            "memoryMB": limits.memory_bytes // MEBIBYTE,
            "diskSizeMB": limits.disk_bytes // MEBIBYTE,
            "metadata": served.metadata,
        }

    async def measure(self, served: ServedSandbox) -> dict[str, Any]:
        """What it uses now; the processor share is an average since its start."""
        used = await served.ask("metrics", {})
        now, limits = time.time(), self._registry.limits
        cpus = limits.cpus or os.cpu_count() or 1
        share = used["cpu_seconds"] / max(now - served.started_at, 0.1) / cpus * 100
        return {
            "timestamp": iso_time(now),
            "timestampUnix": int(now),
            "cpuCount": cpus,
            "cpuUsedPct": round(share, 2),
            "memUsed": used["memory_bytes"],
            "memTotal": limits.memory_bytes,
            "memCache": 0,
            "diskUsed": used["disk_used"],
            "diskTotal": used["disk_total"],
        }


async def json_body(request: web.Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await read_body(request) or b"{}")
    except ValueError:
        raise RequestError("the body is not JSON") from None
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    return body


def string_map(body: dict[str, Any], name: str) -> dict[str, str]:
    values = body.get(name) or {}
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise RequestError(f"{name} is not an object of strings")
    return values


def iso_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"code": status, "message": message}, status=status, headers=headers)


def missing(request: web.Request) -> web.Response:
    return problem(404, f"sandbox {request.match_info['id']} was not found")
