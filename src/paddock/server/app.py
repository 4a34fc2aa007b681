"""The ASGI application: routes, the gate in front of them, and the service behind."""

from __future__ import annotations

import importlib
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute

import paddock
from paddock.config import Access, ConcurrencyConfig, IsolationKind, Limits, ServerConfig, parse_mode, read_variables
from paddock.errors import ConfigError, PaddockError
from paddock.server import openapi
from paddock.server.access import check_access, check_browser, has_token, lookup
from paddock.server.hello import LEASE_HEADER
from paddock.server.http import Episodes, JSONBytes, Tasks, answering, error_response
from paddock.server.mcp import McpEndpoint
from paddock.server.patience import Patient
from paddock.server.service import Service
from paddock.server.sockets import refuse_socket, serve_socket
from paddock.sessions.blueprint import Blueprint
from paddock.sessions.slots import LEASE
from paddock.telemetry.metrics import merge_texts, prometheus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

DEFAULT_SESSIONS = 100
OPEN_PATHS = ("/health",)
PAGE = "/web/"
"""Below it is the page, where there is one. It looks at the token itself: its files are no secret."""
INSIDE_HEADER = "paddock-inside"
OPENENV_PAGE = {"gradio_builder", "custom_tab_name", "custom_tab_primary", "show_default_tab", "title_override"}


def create_app(
    env: Callable[[], Any],
    action_cls: Any = None,
    observation_cls: Any = None,
    env_name: str | None = None,
    max_concurrent_envs: int | None = None,
    concurrency_config: Any = None,
    *,
    state_cls: Any = None,
    reset_observation_cls: Any = None,
    mode: str | None = None,
    isolation: IsolationKind | None = None,
    sessions_per_process: int | None = None,
    config: ServerConfig | None = None,
    **of_their_page: Any,
) -> Starlette:
    """An ASGI application that serves `env`: a class, or a function that makes an instance.

    The first six arguments are OpenEnv's; an app written for it runs with this import instead. `config`
    holds everything else; `isolation` and `sessions_per_process` win over it. What OpenEnv takes for its own page
    (`gradio_builder`, …) has no effect on ours. Raises ConfigError when the class cannot be served as asked.
    """
    if unknown := of_their_page.keys() - OPENENV_PAGE:
        raise TypeError(f"create_app() got an unexpected keyword argument {min(unknown)!r}")
    blueprint = Blueprint(
        env,
        action_type=action_cls,
        observation_type=observation_cls,
        state_type=state_cls,
        reset_observation_type=reset_observation_cls,
        name=env_name,
    )
    chosen = config or default_config(blueprint, max_concurrent_envs, concurrency_config)
    if mode is not None:
        chosen = replace(chosen, mode=parse_mode(mode))
    if isolation is not None or sessions_per_process is not None:
        chosen = replace(
            chosen,
            isolation=isolation or chosen.isolation,
            sessions_per_process=sessions_per_process or chosen.sessions_per_process,
        )
    service = Service(blueprint, chosen)
    app = Application(
        service,
        routes=routes(service),
        lifespan=partial(_lifespan, service),
        exception_handlers={
            HTTPException: _http_error,
            ClientDisconnect: _client_left,
            Exception: _server_error,
        },
    )
    app.add_middleware(Gate, service=service)
    app.state.service = service
    if config is None and read_variables().web:
        # The page stands above the server, which knows no more of it than where its door is.
        importlib.import_module("paddock.web.doors").page_in_server(app)
    return app


def default_config(blueprint: Blueprint, max_sessions: int | None, concurrency: Any) -> ServerConfig:
    """What OpenEnv's two arguments and the environment variables ask for."""
    if max_sessions is not None and concurrency is not None:
        raise ConfigError("max_concurrent_envs and concurrency_config exclude each other")
    variables = read_variables()
    if concurrency is not None:
        known = ConcurrencyConfig(concurrency.max_concurrent_envs, concurrency.session_timeout)
        limits = Limits(max_sessions=known.max_concurrent_envs)
        if known.session_timeout is not None:
            limits = replace(limits, session_timeout=known.session_timeout)
    else:
        if max_sessions is None:
            max_sessions = variables.max_sessions or default_sessions(blueprint)
        limits = Limits(max_sessions=max_sessions)
    if variables.max_waiting is not None:
        limits = replace(limits, max_waiting=variables.max_waiting)
    if variables.max_connections is not None:
        limits = replace(limits, max_connections=variables.max_connections)
    return ServerConfig(limits=limits, access=Access(token=variables.auth_token), mode=variables.mode)


def default_sessions(blueprint: Blueprint) -> int:
    return DEFAULT_SESSIONS if blueprint.concurrent else 1


def routes(service: Service) -> list[Any]:
    """All routes. The frequent ones come first: they are tried in order."""
    simulation = service.config.mode == "simulation"
    episodes, tasks, about = Episodes(service), Tasks(service), About(service)
    socket = Socket(service)
    found: list[Any] = []
    if simulation:
        found += [
            Route("/step", answering(episodes.step), methods=["POST"]),
            Route("/reset", answering(episodes.reset), methods=["POST"]),
            Route("/state", answering(episodes.state), methods=["GET"]),
        ]
    return [
        *found,
        WebSocketRoute("/ws", socket),
        WebSocketRoute("/mcp", socket),
        Route("/health", about.health, methods=["GET"]),
        Route("/metrics", about.metrics, methods=["GET"]),
        Route("/metadata", answering(about.metadata), methods=["GET"]),
        Route("/schema", answering(about.schema), methods=["GET"]),
        Route("/sessions", about.sessions, methods=["GET"]),
        Route("/openapi.json", about.openapi, methods=["GET"]),
        Route("/docs", about.docs, methods=["GET"]),
        Route("/redoc", about.docs, methods=["GET"]),
        *own_routes(service.blueprint.cls),
        Route("/list_environments", tasks.environments, methods=["GET"]),
        Route("/{environment}/splits", answering(tasks.splits), methods=["GET"]),
        Route("/{environment}/tasks", answering(tasks.tasks), methods=["POST"]),
        Route("/{environment}/num_tasks", answering(tasks.num_tasks), methods=["POST"]),
        Route("/{environment}/task", answering(tasks.task), methods=["POST"]),
        Route("/{environment}/task_range", answering(tasks.task_range), methods=["POST"]),
    ]


def own_routes(cls: Any) -> list[Any]:
    """Routes that an environment class brings along, behind the same gate as all others."""
    return list(cls.http_routes()) if hasattr(cls, "http_routes") else []


class Socket:
    """The ASGI endpoint of both WebSocket paths."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await serve_socket(self.service, scope, receive, send)


class About:
    """What the server says about itself and its environment."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._openapi: dict[str, Any] | None = None

    async def health(self, request: Request) -> Response:
        """200 while environments can be built and newcomers are welcome; being full is healthy."""
        service = self.service
        builds = await service.can_build()
        statistics = service.manager.statistics()
        status = {None: "starting", True: "healthy", False: "unhealthy"}[builds]
        if statistics.draining:
            status = "draining"
        body: dict[str, Any] = {"status": status}
        if service.config.access.token is None or has_token(service.config.access, request.headers.get):
            taken = service.manager.slots.taken()
            body |= asdict(statistics)
            body |= {"sessions": taken, "available": max(0, statistics.capacity - taken), "can_build": builds}
            if service.colleagues is not None:
                body["waiting"] = service.colleagues.count_waiting()
            body |= {"environment": service.blueprint.name, "version": paddock.__version__}
        return JSONBytes(body, 200 if status == "healthy" else 503)

    async def metrics(self, request: Request) -> Response:
        manager = self.service.manager
        own = prometheus(manager.metrics, manager.statistics(), manager.worker)
        others = [text.decode() for text in await self._others(request)]
        return PlainTextResponse(merge_texts([own, *others]), media_type="text/plain; version=0.0.4")

    async def metadata(self, request: Request) -> Response:
        return JSONBytes((await self.service.metadata()).model_dump())

    async def schema(self, request: Request) -> Response:
        return JSONBytes(self.service.blueprint.schemas())

    async def sessions(self, request: Request) -> Response:
        own = [asdict(info) for info in self.service.manager.sessions()]
        others = [info for answer in await self._others(request) for info in orjson.loads(answer)]
        return JSONBytes([*own, *others])

    async def openapi(self, request: Request) -> Response:
        return JSONBytes(self._description())

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(openapi.page(self._description()))

    async def _others(self, request: Request) -> list[bytes]:
        """What the other workers answer to the same question, unless it is one of them who asks."""
        colleagues = self.service.colleagues
        if colleagues is None or request.headers.get(INSIDE_HEADER):
            return []
        known = {k: v for k, v in request.headers.items() if k in ("authorization", "host")}
        return await colleagues.gather(request.url.path, known)

    def _description(self) -> dict[str, Any]:
        if self._openapi is None:
            simulation = self.service.config.mode == "simulation"
            self._openapi = openapi.describe(self.service.blueprint, simulation=simulation)
        return self._openapi


class Application(Starlette):
    """Starlette, with the one path that agents call all the time taken before routing."""

    def __init__(self, service: Service, **options: Any) -> None:
        super().__init__(**options)
        self._mcp = Patient(Gate(McpEndpoint(service), service))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/mcp":
            await self._mcp(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class Gate:
    """Checks access before anything else, and sends a request on to the worker that keeps its session."""

    def __init__(self, app: Any, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
        elif scope["type"] == "http":
            await self._request(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _socket(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            check_access(self.service.config.access, lookup(scope["headers"]))
        except PaddockError as error:
            await refuse_socket(scope, receive, send, error)
            return
        await self.app(scope, receive, send)

    async def _request(self, scope: Any, receive: Any, send: Any) -> None:
        path, header = scope["path"], lookup(scope["headers"])
        is_open = path in OPEN_PATHS or (self.service.has_page and path.startswith(PAGE))
        try:
            (check_browser if is_open else check_access)(self.service.config.access, header)
        except PaddockError as error:
            await error_response(error)(scope, receive, send)
            return
        colleagues = self.service.colleagues
        # Any worker answers for the page, and some of its answers have no end.
        own = path.startswith(f"{PAGE}api/")
        if colleagues is not None and not own and await colleagues.forwarded(scope, receive, send, header):
            return
        lease = header(LEASE_HEADER)
        if lease is None:
            await self.app(scope, receive, send)
            return
        LEASE.set(lease)
        try:
            await self.app(scope, receive, send)
        finally:
            self.service.manager.release(lease)


@asynccontextmanager
async def _lifespan(service: Service, app: Starlette) -> AsyncIterator[None]:
    cls: Any = service.blueprint.cls
    service.start()
    try:
        async with cls.lifespan() if hasattr(cls, "lifespan") else nullcontext():
            yield
    finally:
        await service.stop()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONBytes({"detail": error.detail}, error.status_code, dict(error.headers or {}))


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _server_error(request: Request, error: Exception) -> Response:
    return JSONBytes({"detail": f"internal error: {type(error).__name__}", "code": "INTERNAL_ERROR"}, 500)
