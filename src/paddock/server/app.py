"""The ASGI application: routes, the access check in front of them, and the service behind them."""

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
from paddock.config import (
    ENABLE_WEB_INTERFACE,
    PADDOCK_AUTH_TOKEN,
    PADDOCK_MAX_CONNECTIONS,
    PADDOCK_MAX_SESSIONS,
    PADDOCK_MAX_WAITING,
    PADDOCK_MODE,
    Access,
    IsolationKind,
    Limits,
    ServerConfig,
    parse_mode,
)
from paddock.errors import ConfigError, PaddockError
from paddock.server import openapi
from paddock.server.access import check_access, check_browser, has_token, lookup
from paddock.server.asgi_socket import refuse_socket, serve_socket
from paddock.server.handshake import LEASE_HEADER
from paddock.server.http import EpisodeRoutes, JSONBytes, TaskListRoutes, error_response, with_error_responses
from paddock.server.keepalive import SseKeepAlive
from paddock.server.mcp import McpEndpoint
from paddock.server.service import Service
from paddock.sessions.capacity import LEASE
from paddock.sessions.spec import EnvironmentSpec
from paddock.telemetry.metrics import merge_texts, prometheus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

DEFAULT_SESSIONS = 100
OPEN_PATHS = ("/health",)
PAGE = "/web/"
"""Paths of the web page, if it is served. It checks the token itself: its files are no secret."""
INTERNAL_HEADER = "paddock-inside"
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
    **page_options: Any,
) -> Starlette:
    """An ASGI application that serves `env`: a class, or a function that makes an instance.

    The first six arguments are OpenEnv's; an app written for it runs with this import instead. `config`
    holds everything else; `isolation` and `sessions_per_process` win over it. OpenEnv's options for its own page
    (`gradio_builder`, …) are accepted and have no effect. Raises ConfigError if the class cannot be served so.
    """
    if unknown := page_options.keys() - OPENENV_PAGE:
        raise TypeError(f"create_app() got an unexpected keyword argument {min(unknown)!r}")
    spec = EnvironmentSpec(
        env,
        action_type=action_cls,
        observation_type=observation_cls,
        state_type=state_cls,
        reset_observation_type=reset_observation_cls,
        name=env_name,
    )
    settings = config or default_config(spec, max_concurrent_envs, concurrency_config)
    if mode is not None:
        settings = replace(settings, mode=parse_mode(mode))
    if isolation is not None or sessions_per_process is not None:
        settings = replace(
            settings,
            isolation=isolation or settings.isolation,
            sessions_per_process=sessions_per_process or settings.sessions_per_process,
        )
    service = Service(spec, settings)
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
    app.add_middleware(AccessMiddleware, service=service)
    app.state.service = service
    if config is None and ENABLE_WEB_INTERFACE.read():
        # The web package imports the server, so the server imports it only here, by name.
        importlib.import_module("paddock.web.mounts").page_in_server(app)
    return app


def default_config(spec: EnvironmentSpec, max_sessions: int | None, concurrency: Any) -> ServerConfig:
    """The configuration from OpenEnv's two arguments and the environment variables. Raises ConfigError."""
    if max_sessions is not None and concurrency is not None:
        raise ConfigError("max_concurrent_envs and concurrency_config exclude each other")
    if concurrency is not None:
        limits = Limits(max_sessions=concurrency.max_concurrent_envs)
        if concurrency.session_timeout is not None:
            limits = replace(limits, session_timeout=concurrency.session_timeout)
    else:
        if max_sessions is None:
            max_sessions = PADDOCK_MAX_SESSIONS.read() or default_sessions(spec)
        limits = Limits(max_sessions=max_sessions)
    if (max_waiting := PADDOCK_MAX_WAITING.read()) is not None:
        limits = replace(limits, max_waiting=max_waiting)
    if (max_connections := PADDOCK_MAX_CONNECTIONS.read()) is not None:
        limits = replace(limits, max_connections=max_connections)
    return ServerConfig(limits=limits, access=Access(token=PADDOCK_AUTH_TOKEN.read()), mode=PADDOCK_MODE.read())


def default_sessions(spec: EnvironmentSpec) -> int:
    """The capacity of a server where nothing is set."""
    return DEFAULT_SESSIONS if spec.concurrent else 1


def routes(service: Service) -> list[Any]:
    """All routes. The frequent ones come first: they are tried in order."""
    simulation = service.config.mode == "simulation"
    episodes, tasks, info = EpisodeRoutes(service), TaskListRoutes(service), InfoRoutes(service)
    socket = WebSocketEndpoint(service)
    episode_routes: list[Any] = []
    if simulation:
        episode_routes += [
            Route("/step", with_error_responses(episodes.step), methods=["POST"]),
            Route("/reset", with_error_responses(episodes.reset), methods=["POST"]),
            Route("/state", with_error_responses(episodes.state), methods=["GET"]),
        ]
    return [
        *episode_routes,
        WebSocketRoute("/ws", socket),
        WebSocketRoute("/mcp", socket),
        Route("/health", info.health, methods=["GET"]),
        Route("/metrics", info.metrics, methods=["GET"]),
        Route("/metadata", with_error_responses(info.metadata), methods=["GET"]),
        Route("/schema", with_error_responses(info.schema), methods=["GET"]),
        Route("/sessions", info.sessions, methods=["GET"]),
        Route("/openapi.json", info.openapi, methods=["GET"]),
        Route("/docs", info.docs, methods=["GET"]),
        Route("/redoc", info.docs, methods=["GET"]),
        *environment_routes(service.spec.cls),
        Route("/list_environments", tasks.environments, methods=["GET"]),
        Route("/{environment}/splits", with_error_responses(tasks.splits), methods=["GET"]),
        Route("/{environment}/tasks", with_error_responses(tasks.tasks), methods=["POST"]),
        Route("/{environment}/num_tasks", with_error_responses(tasks.num_tasks), methods=["POST"]),
        Route("/{environment}/task", with_error_responses(tasks.task), methods=["POST"]),
        Route("/{environment}/task_range", with_error_responses(tasks.task_range), methods=["POST"]),
    ]


def environment_routes(cls: Any) -> list[Any]:
    """Routes that the environment class adds. They have the same access check as all others."""
    return list(cls.http_routes()) if hasattr(cls, "http_routes") else []


class WebSocketEndpoint:
    """The ASGI endpoint of both WebSocket paths."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await serve_socket(self.service, scope, receive, send)


class InfoRoutes:
    """Routes that describe the server and its environment."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._openapi: dict[str, Any] | None = None

    async def health(self, request: Request) -> Response:
        """200 while environments can be built and the server does not drain. A full server is healthy."""
        service = self.service
        builds = await service.can_build()
        statistics = service.manager.statistics()
        status = {None: "starting", True: "healthy", False: "unhealthy"}[builds]
        if statistics.draining:
            status = "draining"
        body: dict[str, Any] = {"status": status}
        if service.config.access.token is None or has_token(service.config.access, request.headers.get):
            active = service.manager.slots.in_use()
            body |= asdict(statistics)
            body |= {"sessions": active, "available": max(0, statistics.capacity - active), "can_build": builds}
            if service.siblings is not None:
                body["waiting"] = service.siblings.count_waiting()
            body |= {"environment": service.spec.name, "version": paddock.__version__}
        return JSONBytes(body, 200 if status == "healthy" else 503)

    async def metrics(self, request: Request) -> Response:
        """Counters and gauges in Prometheus' text format, of all workers."""
        manager = self.service.manager
        texts = [prometheus(manager.metrics, manager.statistics(), manager.worker)]
        texts += [text.decode() for text in await self._gather_from_siblings(request)]
        return PlainTextResponse(merge_texts(texts), media_type="text/plain; version=0.0.4")

    async def metadata(self, request: Request) -> Response:
        """Name, version and description of the environment."""
        return JSONBytes((await self.service.metadata()).model_dump())

    async def schema(self, request: Request) -> Response:
        """JSON Schemas of the environment's action, observation and state."""
        return JSONBytes(self.service.spec.schemas())

    async def sessions(self, request: Request) -> Response:
        """The open sessions of all workers."""
        sessions = [asdict(session) for session in self.service.manager.sessions()]
        for response in await self._gather_from_siblings(request):
            sessions += orjson.loads(response)
        return JSONBytes(sessions)

    async def openapi(self, request: Request) -> Response:
        """The OpenAPI description of the routes."""
        return JSONBytes(self._description())

    async def docs(self, request: Request) -> Response:
        """A page that shows the OpenAPI description."""
        return HTMLResponse(openapi.page(self._description()))

    async def _gather_from_siblings(self, request: Request) -> list[bytes]:
        """The responses of the other workers to the same request; none if one of them sent it."""
        siblings = self.service.siblings
        if siblings is None or request.headers.get(INTERNAL_HEADER):
            return []
        headers = {k: v for k, v in request.headers.items() if k in ("authorization", "host")}
        return await siblings.gather(request.url.path, headers)

    def _description(self) -> dict[str, Any]:
        if self._openapi is None:
            simulation = self.service.config.mode == "simulation"
            self._openapi = openapi.describe(self.service.spec, simulation=simulation)
        return self._openapi


class Application(Starlette):
    """Starlette, except that `/mcp` skips routing: agents call it all the time."""

    def __init__(self, service: Service, **options: Any) -> None:
        super().__init__(**options)
        self._mcp = SseKeepAlive(AccessMiddleware(McpEndpoint(service), service))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/mcp":
            await self._mcp(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class AccessMiddleware:
    """Checks access first, then forwards a request to the worker that keeps its session."""

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
        siblings = self.service.siblings
        # Any worker can answer for the page, and some of its answers are endless streams.
        is_page = path.startswith(f"{PAGE}api/")
        if siblings is not None and not is_page and await siblings.forwarded(scope, receive, send, header):
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
    cls: Any = service.spec.cls
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
