"""The API routes about training: the streams of the store, and the figures of one."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from paddock.train.stream_state import FILE
from paddock.train.training_view import list_streams, read_training
from paddock.web.responses import handle_errors, json_response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from paddock.train.training_view import TrainingView
    from paddock.web.read_store import ReadStore


class TrainingRoutes:
    def __init__(self, store: ReadStore) -> None:
        self._store = store

    @property
    def exists(self) -> bool:
        """Whether a stream has written into this store."""
        return (self._store.folder / FILE).exists()

    def routes(self) -> list[Route]:
        endpoints = [("/api/streams", self.streams), ("/api/streams/{name:path}", self.stream)]
        return [Route(path, handle_errors(endpoint), methods=["GET"]) for path, endpoint in endpoints]

    async def streams(self, request: Request) -> Response:
        return json_response(request, {"streams": await asyncio.to_thread(list_streams, self._store.folder)})

    async def stream(self, request: Request) -> Response:
        view = await asyncio.to_thread(read_training, self._store.folder, request.path_params["name"])
        return json_response(request, document(view))


def document(view: TrainingView) -> dict[str, Any]:
    """A view as JSON: the rewards of a source become a list, as JSON has no numbers as keys."""
    sources = [
        {"name": name, "rewards": [{"version": version, **asdict(reward)} for version, reward in series.items()]}
        for name, series in view.sources.items()
    ]
    return {**asdict(view), "sources": sources}
