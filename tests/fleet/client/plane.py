"""A small control plane with instances, in a thread of its own, that can be told to fail in every way a network can.

The instances live under paths of the same server. Work is done for real (rows are inserted, verifiers run), so that a
lost answer and a request that never ran can be told apart.
"""

import asyncio
import base64
import contextlib
import io
import json
import pickle
import re
import threading
import time
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

KEY = "key-that-must-not-show"
RUNNER_TOKEN = "runner"


@dataclass
class Fault:
    """What goes wrong with requests of this method whose `METHOD path` is matched; `times` -1 is always."""

    method: str
    path: str
    status: int | None = None
    times: int = 1
    after: bool = False
    """Do the work, then lose the answer."""
    drop: bool = False
    hang: bool = False
    stall: bool = False
    """Send the headers, then nothing."""
    dribble: bool = False
    """One byte every 50 ms."""
    cut_stream: bool = False
    """A stream of events that ends before the answer."""
    delay: float = 0.0
    is_waiting: bool = False
    """Whether a request has arrived as a whole and is not carried out yet, because of the delay."""
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    rpc: str | None = None
    """Only JSON-RPC requests of this method."""


@dataclass
class Box:
    """One instance."""

    id: str
    env_key: str
    body: dict[str, Any]
    made_at: float
    request_id: str = ""
    status: str = "running"
    rows: list[str] = field(default_factory=list)
    resets: int = 0
    beats: int = 0
    answers: dict[str, Any] = field(default_factory=dict)


def tool(name: str, **hints: bool) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    return {"name": name, "description": name, "inputSchema": schema, "annotations": hints}


ADD, SHOW, FAIL, PUT = tool("add"), tool("show", readOnlyHint=True), tool("fail"), tool("put", idempotentHint=True)
COMPUTER = tool("computer")
PIXEL = "iVBORw0KGgo="


class LabPlane:
    """`with LabPlane() as plane:` and `plane.url` is a control plane."""

    def __init__(self) -> None:
        self.boxes: dict[str, Box] = {}
        self.named: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str]] = []
        self.times: list[float] = []
        self.rpc: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.verifier_runs = 0
        self.running_creates = 0
        self.most_creates = 0
        self.create_seconds = 0.0
        self.pending_seconds = 0.0
        self.gated = False
        self.repeats_safely = False
        self.stateless = False
        self.streams = False
        self.sessions = False
        self.known_sessions: set[str] = set()
        self.api_tools = [ADD, SHOW, FAIL, PUT]
        self.aggregator_tools: list[dict[str, Any]] = []
        self.heartbeat_interval: int | None = None
        self.image: str | None = PIXEL
        self.keepalive = 75.0
        self.dedup = True
        self.shows_request_ids = False
        self.limit: int | None = None

    # -- its life ---------------------------------------------------------------------------------------

    def __enter__(self) -> "LabPlane":
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _serve(self, started: threading.Event) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            app = web.Application(middlewares=[self._faulty], client_max_size=2**26)
            app.router.add_route("*", "/{path:.*}", self._route)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, keepalive_timeout=self.keepalive)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
            await site.start()
            self.port: int = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
            self.url = f"http://127.0.0.1:{self.port}"
            started.set()
            await self._stop.wait()
            # asyncio forgets a connection that it accepts in the iteration in which its server is closed.
            self._loop.remove_reader(site._server.sockets[0].fileno())  # type: ignore[union-attr]
            for _ in range(3):
                await asyncio.sleep(0)
            await runner.cleanup()

        asyncio.run(main())

    # -- for tests --------------------------------------------------------------------------------------

    def fail(self, method: str, path: str, status: int | None = None, **how: Any) -> Fault:
        fault = Fault(method, path, status, **how)
        self.faults.append(fault)
        return fault

    def heal(self) -> None:
        self.faults.clear()

    @property
    def running(self) -> list[Box]:
        return [box for box in self.boxes.values() if box.status == "running"]

    def count(self, method: str, path: str) -> int:
        return sum(seen == method and re.search(path, where) is not None for seen, where in self.seen)

    @property
    def box(self) -> Box:
        return list(self.boxes.values())[-1]

    # -- faults -----------------------------------------------------------------------------------------

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Any) -> web.StreamResponse:
        path = request.path_qs
        self.seen.append((request.method, path))
        self.times.append(time.monotonic())
        self.headers.append(dict(request.headers))
        fault = await self._fault(request)
        if fault is None:
            return await handler(request)
        if fault.delay:
            await request.read()  # Whoever sent it may be gone when it is carried out.
            fault.is_waiting = True
            await asyncio.sleep(fault.delay)
        answer = await handler(request) if fault.after else None
        if fault.hang:
            await self._stop.wait()
        if fault.drop:
            cut(request)
            return web.Response()
        if fault.stall or fault.dribble or fault.cut_stream:
            return await self._slowly(request, fault)
        if fault.status is not None:
            body = fault.body if fault.body is not None else {"detail": "injected"}
            return web.json_response(body, status=fault.status, headers=fault.headers)
        answer = answer if answer is not None else await handler(request)
        fault.is_waiting = False
        return answer

    async def _fault(self, request: web.Request) -> Fault | None:
        for fault in self.faults:
            if fault.times == 0 or fault.method != request.method or not re.search(fault.path, request.path_qs):
                continue
            if fault.rpc is not None and json.loads(await request.read()).get("method") != fault.rpc:
                continue
            fault.times -= 1
            return fault
        return None

    async def _slowly(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        kind = "text/event-stream" if fault.cut_stream else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        if fault.cut_stream:
            await response.write(b'event: message\ndata: {"jsonrpc":"2.0","method":"notifications/x"}\n\n')
            await response.write_eof()
            return response
        with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
            while fault.dribble and not self._stop.is_set():
                await response.write(b" ")
                await asyncio.sleep(0.05)
        await self._stop.wait()
        return response

    # -- routes -----------------------------------------------------------------------------------------

    async def _route(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path.startswith("/i/"):
            _, _, instance, *rest = path.split("/")
            return await self._instance(request, self.boxes[instance], "/".join(rest))
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"detail": "wrong key"}, status=401)
        if path == "/v1/env/instances" and request.method == "POST":
            return await self._create(request)
        if path == "/v1/env/instances/batch":
            run = request.query["run_id"]
            ended = [box for box in self.running if box.body.get("run_id") == run]
            for box in ended:
                box.status = "stopped"
            return web.json_response([self._shown(box) for box in ended])
        if path == "/v1/env/instances":
            run = request.query.get("run_id")
            text = [box for box in self.boxes.values() if run in (None, box.body.get("run_id"))]
            return web.json_response([self._shown(box) for box in text])
        if path.startswith("/v1/env/instances/"):
            return self._one(request, path.split("/")[4])
        if path == "/v1/runner-auth/token" and self.gated:
            return web.json_response({"token": RUNNER_TOKEN})
        if path == "/v1/verifiers/execute":
            return web.json_response(await self._verify(request))
        if path == "/v1/traces/jobs":
            return web.json_response({"job_id": "job-1", "name": "x", "status": "ok"})
        if path == "/v1/sessions/ingest":
            return web.json_response({"session_id": "session-1"})
        return web.json_response({"detail": "nothing here"}, status=404)

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = request.headers["X-Request-ID"]
        if name in self.named and self.dedup:
            detail = {"error": "duplicate_request_id", "message": "again", "instance_id": self.named[name]}
            return web.json_response({"detail": detail}, status=409)
        if self.limit is not None and len(self.running) >= self.limit:
            detail = {"error_type": "instance_limit_exceeded", "message": "full", "instance_limit": self.limit}
            return web.json_response({"detail": detail}, status=403)
        box = Box(f"inst-{uuid.uuid4().hex[:8]}", body["env_key"], body, time.monotonic(), request_id=name)
        self.named[name] = box.id
        self.boxes[box.id] = box
        self.running_creates += 1
        self.most_creates = max(self.most_creates, self.running_creates)
        if self.pending_seconds:
            box.status = "pending"
            self._loop.call_later(self.pending_seconds, setattr, box, "status", "running")
        try:
            await asyncio.sleep(self.create_seconds)
        finally:
            self.running_creates -= 1
        if ttl := body.get("ttl_seconds"):
            self._loop.call_later(ttl, self._expire, box)
        return web.json_response(self._shown(box))

    def _expire(self, box: Box) -> None:
        box.status = "stopped"

    def _shown(self, box: Box) -> dict[str, Any]:
        root = f"{self.url}/i/{box.id}/"
        return {
            "instance_id": box.id, "env_key": box.env_key, "version": box.body.get("env_version", "v1"),
            "status": box.status, "subdomain": "x", "created_at": "now", "updated_at": "now", "team_id": "t",
            "region": "local", "run_id": box.body.get("run_id"),
            "request_id": box.request_id if self.shows_request_ids else None,
            "heartbeat_interval": self.heartbeat_interval,
            "urls": {"root": root, "app": [root], "manager": {"api": f"{root}{box.env_key}/api/v1/env"}},
        }  # fmt: skip

    def _one(self, request: web.Request, name: str) -> web.Response:
        box = self.boxes.get(name)
        if box is None:
            return web.json_response({"detail": "no such instance"}, status=404)
        if request.path.endswith("/heartbeat"):
            box.beats += 1
            return web.json_response({"success": True, "instance_id": box.id})
        if request.method == "DELETE":
            if box.status == "stopped":
                return web.json_response({"detail": "Instance already terminated"}, status=400)
            box.status = "stopped"
        return web.json_response(self._shown(box))

    async def _verify(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        box = self.boxes[body["args_array"][-1]["env"]]
        if box.status != "running":
            return {"success": False, "result": None, "error": {"type": "InstanceGone", "message": "it ended"}}
        self.verifier_runs += 1
        with zipfile.ZipFile(io.BytesIO(base64.b64decode(body["bundle"]))) as bundle:
            source = bundle.read("verifier.py").decode()
        packed = DataOnly(io.BytesIO(base64.b64decode(body["args"]))).load()
        spoken: list[str] = []
        names: dict[str, Any] = {"print": lambda *values: spoken.append(" ".join(map(str, values)))}
        answer = {"execution_id": f"exec-{self.verifier_runs}", "execution_time_ms": 1, "error": None, "result": None}
        try:
            exec(source, names)
            result = names[body["function_name"]](box, **packed["kwargs"])
            return answer | {"success": True, "result": result, "stdout": "\n".join(spoken)}
        except Exception as error:
            reply = {"type": type(error).__name__, "message": str(error)}
            return answer | {"success": False, "error": reply, "stdout": "\n".join(spoken)}

    # -- one instance -----------------------------------------------------------------------------------

    async def _instance(self, request: web.Request, box: Box, path: str) -> web.StreamResponse:
        if box.status != "running":
            cut(request)
            return web.Response()
        if path in ("mcp", "api/v1/mcp"):
            tools = self.api_tools if path == "mcp" else self.aggregator_tools
            if path == "api/v1/mcp" and not tools:
                return web.json_response({"detail": "nothing here"}, status=404)
            return await self._mcp(request, box, tools)
        if self.gated and request.headers.get("X-Runner-Token") != RUNNER_TOKEN:
            return web.json_response({"detail": "Not Found"}, status=404)
        if path.endswith("/reset"):
            box.rows.clear()
            box.resets += 1
            return web.json_response({"success": True, "message": "reset"})
        if path.endswith("/step"):
            return web.json_response({"observation": "plain", "reward": 1, "done": True})
        if path.endswith("/state"):
            return web.json_response({"episode_id": "e", "step_count": 3})
        if path.endswith("/query"):
            return web.json_response({"success": True, "message": "", "columns": ["n"], "rows": [[len(box.rows)]]})
        if path.endswith("/describe"):
            return web.json_response({"success": True, "resource_name": "seed", "message": "", "tables": []})
        return web.json_response({"detail": "nothing here"}, status=404)

    async def _mcp(self, request: web.Request, box: Box, tools: list[dict[str, Any]]) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=200 if request.method == "DELETE" else 405)
        call = await request.json()
        method, params = call["method"], call.get("params", {})
        self.rpc.append(method)
        session = request.headers.get("Mcp-Session-Id")
        if self.sessions and method != "initialize" and session not in self.known_sessions:
            return web.json_response({"detail": "session gone"}, status=404)
        if "id" not in call:
            return web.Response(status=202)
        headers = {}
        if method == "initialize" and self.sessions:
            headers["Mcp-Session-Id"] = session = uuid.uuid4().hex
            self.known_sessions.add(session)
        reply = {"jsonrpc": "2.0", "id": call["id"], **self._answer(box, method, params, tools)}
        if not self.streams:
            return web.json_response(reply, headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await response.prepare(request)
        note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {}}
        await response.write(f"event: message\r\ndata: {json.dumps(note)}\r\n\r\n".encode())
        await response.write(f": keep alive\n\nevent: message\ndata: {json.dumps(reply)}\n\n".encode())
        await response.write_eof()
        return response

    def _answer(self, box: Box, method: str, params: Any, tools: list[dict[str, Any]]) -> dict[str, Any]:
        if method == "initialize" and not self.stateless:
            capabilities: dict[str, Any] = {"tools": {}}
            if self.repeats_safely:
                capabilities["experimental"] = {"paddock/idempotency": {}}
            return {"result": {"protocolVersion": "2025-06-18", "capabilities": capabilities, "serverInfo": {}}}
        if method == "tools/list":
            return {"result": {"tools": tools}}
        if method == "tools/call":
            key = params.get("_meta", {}).get("paddock/idempotency-key")
            if key is None or not self.repeats_safely:
                return {"result": self._call(box, params)}
            return {
                "result": box.answers[key]
                if key in box.answers
                else box.answers.setdefault(key, self._call(box, params))
            }
        return {"error": {"code": -32601, "message": "no such method"}}

    def _call(self, box: Box, params: Any) -> dict[str, Any]:
        name, arguments = params["name"], params.get("arguments", {})
        if name == "computer":
            if self.image is None:
                return {"content": [{"type": "text", "text": '{"base64_image": null}'}]}
            return {"content": [{"type": "text", "text": "screen"}, {"type": "image", "data": self.image}]}
        if name == "fail":
            return {"content": [{"type": "text", "text": "it failed"}], "isError": True}
        if name == "show":
            return {"content": [{"type": "text", "text": json.dumps(box.rows)}], "isError": False}
        box.rows.append(str(arguments.get("text", "")))
        return {"content": [{"type": "text", "text": json.dumps({"rows": len(box.rows)})}], "isError": False}


def cut(request: web.Request) -> None:
    """Drop the connection, unless the client has done so."""
    if request.transport is not None:
        request.transport.abort()


class DataOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not data")


@contextlib.contextmanager
def lab(**settings: Any) -> Iterator[LabPlane]:
    plane = LabPlane()
    for name, value in settings.items():
        assert hasattr(plane, name), name
        setattr(plane, name, value)
    with plane:
        yield plane
