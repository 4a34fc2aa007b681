"""The control API: sandboxes are created, listed, kept alive and killed. `X-API-KEY` opens it."""

from __future__ import annotations

import hmac
import os
import time
import urllib.parse
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from paddock.errors import CapacityReached, RequestError, SandboxError
from paddock.rollouts.e2b.arrival import whole_body
from paddock.rollouts.limits import MEBIBYTE

if TYPE_CHECKING:
    from paddock.rollouts.e2b.guest import Guest
    from paddock.rollouts.e2b.lifecycle import Guests

ENVD_VERSION = "0.6.4"
"""Of E2B's daemon, whose abilities `inner` has."""
CLIENT = "paddock"
MOST_LISTED = 100
REFUSED = {
    "pause": "sandboxes cannot be paused here: their memory is that of running processes",
    "resume": "sandboxes cannot be paused here, so there is nothing to resume",
    "fork": "sandboxes cannot be forked here",
    "snapshots": "there are no snapshots here",
    "network": "sandboxes have no network here, so there is none to change",
    "logs": "no logs are kept here: listen to the commands",
}
NOT_HERE = {
    "autoPause": "sandboxes cannot be paused here: leave out lifecycle.on_timeout",
    "mcp": "there is no MCP gateway here",
    "volumeMounts": "there are no volumes here",
    "iam": "there is no workload identity here",
}


class Api:
    def __init__(self, guests: Guests, *, key: str, domain: str) -> None:
        self._guests, self._key, self._domain = guests, key, domain

    def routes(self) -> list[web.RouteDef]:
        one = "/sandboxes/{id}"
        found = [
            web.post("/v2/sandboxes", self.create),
            web.post("/sandboxes", self.create),
            web.get("/v2/sandboxes", self.list),
            web.get("/sandboxes", self.list),
            web.get("/sandboxes/metrics", self.metrics_of_all),
            web.get(one, self.show),
            web.delete(one, self.kill),
            web.post(f"{one}/timeout", self.set_timeout),
            web.post(f"{one}/refreshes", self.refresh),
            web.post(f"{one}/connect", self.connect),
            web.post(f"/v2{one}/connect", self.connect),
            web.get(f"{one}/metrics", self.metrics),
        ]
        for name in REFUSED:
            found += [web.route("*", f"{one}/{name}", self.refuse), web.route("*", f"/v2{one}/{name}", self.refuse)]
        return found

    def opens(self, request: web.Request) -> bool:
        return hmac.compare_digest(request.headers.get("X-API-KEY", "").encode(errors="replace"), self._key.encode())

    # -- routes ---------------------------------------------------------------------------------------

    async def create(self, request: web.Request) -> web.Response:
        asked = await body_of(request)
        for name, why in NOT_HERE.items():
            if asked.get(name):
                return problem(400, why)
        try:
            guest = await self._guests.create(
                template=str(asked.get("templateID") or "base"),
                seconds=None if asked.get("timeout") is None else int(asked["timeout"]),
                metadata=texts(asked, "metadata"),
                envs=texts(asked, "envVars"),
            )
        except CapacityReached as error:
            return problem(429, error.message, {"Should-Retry": "false"})
        except (RequestError, ValueError) as error:
            return problem(400, str(error))
        except SandboxError as error:
            return problem(500, f"{error.message}{f' ({error.hint})' if error.hint else ''}")
        return web.json_response(self.handle(guest), status=201)

    async def connect(self, request: web.Request) -> web.Response:
        guest, asked = self._wanted(request), await body_of(request)
        if guest is None:
            return missing(request)
        if asked.get("timeout") is not None:
            self._guests.keep(guest, int(asked["timeout"]), only_longer=True)
        return web.json_response(self.handle(guest))

    async def show(self, request: web.Request) -> web.Response:
        guest = self._wanted(request)
        if guest is None:
            return missing(request)
        return web.json_response({**self.listed(guest), "domain": self._domain, "envdAccessToken": guest.token})

    async def list(self, request: web.Request) -> web.Response:
        """By `metadata`, `template` and `startedAfter`; pages of `limit`, in the order of their start."""
        query = request.query
        wanted = {
            urllib.parse.unquote(name): urllib.parse.unquote(value)
            for name, value in urllib.parse.parse_qsl(query.get("metadata", ""))
        }
        found = [guest for guest in self._guests.all() if wanted.items() <= guest.metadata.items()]
        if "template" in query:
            found = [guest for guest in found if guest.template == query["template"]]
        states = ",".join(query.getall("state", [])) or "running"
        if "running" not in states:
            found = []
        if "startedAfter" in query:
            after = datetime.fromisoformat(query["startedAfter"]).timestamp()
            found = [guest for guest in found if guest.started_at > after]
        if query.get("order") == "desc":
            found.reverse()
        first = int(query.get("nextToken") or 0)
        last = first + min(int(query.get("limit") or MOST_LISTED), MOST_LISTED)
        headers = {"x-next-token": str(last)} if last < len(found) else {}
        return web.json_response([self.listed(guest) for guest in found[first:last]], headers=headers)

    async def kill(self, request: web.Request) -> web.Response:
        gone = await self._guests.kill(request.match_info["id"])
        return web.Response(status=204) if gone else missing(request)

    async def set_timeout(self, request: web.Request) -> web.Response:
        guest, asked = self._wanted(request), await body_of(request)
        if guest is None:
            return missing(request)
        self._guests.keep(guest, int(asked["timeout"]))
        return web.Response(status=204)

    async def refresh(self, request: web.Request) -> web.Response:
        guest, asked = self._wanted(request), await body_of(request)
        if guest is None:
            return missing(request)
        self._guests.keep(guest, int(asked.get("duration") or 60), only_longer=True)
        return web.Response(status=204)

    async def metrics(self, request: web.Request) -> web.Response:
        guest = self._wanted(request)
        if guest is None:
            return missing(request)
        return web.json_response([await self.metric(guest)])

    async def metrics_of_all(self, request: web.Request) -> web.Response:
        wanted = ",".join(request.query.getall("sandbox_ids", [])).split(",")
        found = [guest for guest in map(self._guests.find, wanted) if guest is not None]
        return web.json_response({"sandboxes": {guest.id: await self.metric(guest) for guest in found}})

    async def refuse(self, request: web.Request) -> web.Response:
        if self._wanted(request) is None:
            return missing(request)
        return problem(501, REFUSED[request.path.rpartition("/")[2]])

    # -- words ----------------------------------------------------------------------------------------

    def _wanted(self, request: web.Request) -> Guest | None:
        return self._guests.find(request.match_info["id"])

    def handle(self, guest: Guest) -> dict[str, Any]:
        return {
            "sandboxID": guest.id,
            "templateID": guest.template,
            "clientID": CLIENT,
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": guest.token,
            "domain": self._domain,
        }

    def listed(self, guest: Guest) -> dict[str, Any]:
        limits = self._guests.limits
        return {
            "sandboxID": guest.id,
            "templateID": guest.template,
            "clientID": CLIENT,
            "envdVersion": ENVD_VERSION,
            "startedAt": moment(guest.started_at),
            "endAt": moment(guest.end_at),
            "state": "running",
            "cpuCount": limits.cpus or os.cpu_count() or 1,
            "memoryMB": limits.memory_bytes // MEBIBYTE,
            "diskSizeMB": limits.disk_bytes // MEBIBYTE,
            "metadata": guest.metadata,
        }

    async def metric(self, guest: Guest) -> dict[str, Any]:
        """How much it uses now; of its processors, on average since its start."""
        used = await guest.ask("metrics", {})
        now, limits = time.time(), self._guests.limits
        cpus = limits.cpus or os.cpu_count() or 1
        share = used["cpu_seconds"] / max(now - guest.started_at, 0.1) / cpus * 100
        return {
            "timestamp": moment(now),
            "timestampUnix": int(now),
            "cpuCount": cpus,
            "cpuUsedPct": round(share, 2),
            "memUsed": used["memory_bytes"],
            "memTotal": limits.memory_bytes,
            "memCache": 0,
            "diskUsed": used["disk_used"],
            "diskTotal": used["disk_total"],
        }


async def body_of(request: web.Request) -> dict[str, Any]:
    try:
        found = orjson.loads(await whole_body(request) or b"{}")
    except ValueError:
        raise RequestError("the body is not JSON") from None
    if not isinstance(found, dict):
        raise RequestError("the body is not a JSON object")
    return found


def texts(asked: dict[str, Any], name: str) -> dict[str, str]:
    found = asked.get(name) or {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise RequestError(f"{name} is not an object of texts")
    return found


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"code": status, "message": message}, status=status, headers=headers)


def missing(request: web.Request) -> web.Response:
    return problem(404, f"sandbox {request.match_info['id']} was not found")
