"""The routes about rollouts: the table and its figures, one rollout in every depth, and what goes on right now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.routing import Route

from paddock.rollouts.store import search
from paddock.web import asked, calls, compare, detail, live, share, stats, tokens, workdir
from paddock.web.answers import Conflict, PageError, answer, answering
from paddock.web.shelf import ROLLOUTS, Shelf, summaries
from paddock.web.streams import stream

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    from starlette.requests import Request

    from paddock.rollouts.store.search import Order, Search
    from paddock.web.files import Assets
    from paddock.web.live import Watch
    from paddock.web.trail import Trail

PAGE = ("sort", "order", "offset", "limit")
ITEMS = 500
MOST_ITEMS = 5000
TOKENS = 4000
MOST_TOKENS = 50_000
MOST_MEMBERS = 256


class Rollouts:
    def __init__(self, shelf: Shelf, watch: Watch, assets: Assets, about: Callable[[], dict[str, Any]]) -> None:
        self.shelf = shelf
        self.watch = watch
        self.assets = assets
        self.about = about

    def routes(self) -> list[Route]:
        one = "/api/rollouts/{id}"
        found = [
            ("/api/rollouts", self.table),
            ("/api/facets", self.facets),
            ("/api/stats", self.stats),
            ("/api/groups", self.groups),
            ("/api/compare", self.compare),
            ("/api/live", self.live),
            (one, self.one),
            (f"{one}/transcript", self.transcript),
            (f"{one}/calls", self.calls),
            (f"{one}/calls/{{call}}", self.call),
            (f"{one}/calls/{{call}}/tokens", self.tokens),
            (f"{one}/entropy", self.entropy),
            (f"{one}/files", self.files),
            (f"{one}/changes", self.changes),
            (f"{one}/live", self.follow),
            (f"{one}/share", self.share),
        ]
        return [
            *(Route(path, answering(endpoint), methods=["GET"]) for path, endpoint in found),
            Route(f"{one}/abort", answering(self.abort), methods=["POST"]),
        ]

    # -- many ---------------------------------------------------------------------------------------

    async def table(self, request: Request) -> Response:
        asked.check_names(request, (*asked.SEARCHED, *PAGE))
        wanted, (sort, order), (offset, limit) = asked.search(request), asked.sorting(request), asked.paging(request)
        total, rows = await self.shelf.ask(_table, wanted, sort, order, offset, limit)
        return answer(request, {"total": total, "offset": offset, "rows": rows})

    async def facets(self, request: Request) -> Response:
        asked.check_names(request, ())
        return answer(request, await self.shelf.remembered(search.facets))

    async def stats(self, request: Request) -> Response:
        asked.check_names(request, asked.SEARCHED)
        return answer(request, await self.shelf.remembered(stats.stats, asked.search(request)))

    async def groups(self, request: Request) -> Response:
        asked.check_names(request, ("task", "batch", "offset", "limit"))
        offset, limit = asked.paging(request, 50)
        task, batch = asked.text(request, "task"), asked.text(request, "batch")
        found = await self.shelf.remembered(_groups, task, batch, offset, limit)
        return answer(request, found)

    async def live(self, request: Request) -> Response:
        await self.shelf.store()
        return stream(live.rows(self.shelf, self.watch))

    async def compare(self, request: Request) -> Response:
        asked.check_names(request, ("a", "b"))
        first, second = asked.text(request, "a"), asked.text(request, "b")
        if first is None or second is None:
            raise PageError("two rollouts are needed", hint="give a=ID&b=ID")
        other = await self.shelf.trail(second)
        return answer(request, await self.shelf.with_trail(first, compare.compare, other))

    # -- one ----------------------------------------------------------------------------------------

    async def one(self, request: Request) -> Response:
        return answer(request, await self._with(request, detail.whole))

    async def transcript(self, request: Request) -> Response:
        asked.check_names(request, ("after", "limit"))
        after = asked.whole(request, "after", 0, 0, asked.FURTHEST)
        limit = asked.whole(request, "limit", ITEMS, 1, MOST_ITEMS)
        return answer(request, await self._with(request, _items, after, limit))

    async def calls(self, request: Request) -> Response:
        return answer(request, {"calls": await self._with(request, calls.listed)})

    async def call(self, request: Request) -> Response:
        return answer(request, await self._with(request, calls.whole, asked.path_text(request, "call")))

    async def tokens(self, request: Request) -> Response:
        asked.check_names(request, ("part", "offset", "limit"))
        part = asked.choice(request, "part", tokens.PARTS, "completion")
        offset = asked.whole(request, "offset", 0, 0, asked.FURTHEST)
        limit = asked.whole(request, "limit", TOKENS, 1, MOST_TOKENS)
        call = asked.path_text(request, "call")
        return answer(request, await self._with(request, tokens.page, call, part, offset, limit))

    async def entropy(self, request: Request) -> Response:
        asked.check_names(request, ("call",))
        call = asked.text(request, "call")
        if call is None:
            raise PageError("no call is named", hint="give call=c0")
        return answer(request, await self._with(request, tokens.curve, call))

    async def files(self, request: Request) -> Response:
        asked.check_names(request, ("path",))
        path = asked.text(request, "path")
        if path is None:
            raise PageError("no file is named", hint="give path=…")
        return answer(request, await self._with(request, workdir.one, path))

    async def changes(self, request: Request) -> Response:
        return answer(request, await self._with(request, workdir.changes))

    async def follow(self, request: Request) -> Response:
        asked.check_names(request, ("after",))
        after = asked.whole(request, "after", 0, 0, asked.FURTHEST)
        trail = await self.shelf.trail(asked.path_text(request, "id"))
        return stream(live.rollout(self.shelf, self.watch, trail.id, after))

    async def abort(self, request: Request) -> Response:
        """Ask a running rollout to stop, in whatever process it runs."""
        trail = await self.shelf.trail(asked.path_text(request, "id"))
        if trail.finished:
            raise Conflict(f"rollout {trail.id} has ended: {trail.head['outcome']}", hint="there is nothing to stop")
        if trail.is_orphan:
            hint = "the next command that writes to this store gives it its outcome"
            raise Conflict(f"the process that ran {trail.id} is gone", hint=hint)
        store = await self.shelf.store(ROLLOUTS)
        await store.run(store.aborts.ask, trail.id, "stopped from the page")
        return answer(request, {"asked": True})

    async def share(self, request: Request) -> Response:
        name, content = await self.shared(asked.path_text(request, "id"))
        headers = {
            "content-disposition": f'attachment; filename="{name}.html"',
            "cache-control": "no-store",
        }
        return Response(content, 200, headers, "text/html; charset=utf-8")

    async def shared(self, rollout_id: str) -> tuple[str, bytes]:
        """The whole id of a rollout, and its page as a file."""
        about = {**self.about(), "store": None, "can_abort": False}
        about["parts"] = {**about["parts"], "play": False, "server": False, "fleet": False}
        data = await self.shelf.with_trail(rollout_id, share.collected, about)
        name = str(data["id"])
        title = f"{name} · {data['answers'][f'rollouts/{name}']['task_id']}"
        return name, share.page(self.assets, title, data)

    async def _with(self, request: Request, question: Callable[..., Any], *args: Any) -> Any:
        return await self.shelf.with_trail(asked.path_text(request, "id"), question, *args)


def _table(
    connection: sqlite3.Connection, wanted: Search, sort: str, order: Order, offset: int, limit: int
) -> tuple[int, list[dict[str, Any]]]:
    keys = search.page(connection, wanted, sort=sort, order=order, offset=offset, limit=limit)
    return search.count(connection, wanted), summaries(connection, keys)


def _groups(
    connection: sqlite3.Connection, task: str | None, batch: str | None, offset: int, limit: int
) -> dict[str, Any]:
    total, found = search.groups(
        connection, task=task, batch=batch, offset=offset, limit=limit, most_members=MOST_MEMBERS
    )
    return {
        "total": total,
        "offset": offset,
        "groups": [
            {
                "group_id": f"{group.batch_id}/{group.task_id}",
                "task_id": group.task_id,
                "batch_id": group.batch_id,
                "count": group.count,
                "scored": group.scored,
                "mean": group.mean,
                "members": summaries(connection, group.members),
            }
            for group in found
        ],
    }


def _items(connection: sqlite3.Connection, trail: Trail, after: int, limit: int) -> dict[str, Any]:
    items = trail.items[after : after + limit]
    reached = after + len(items)
    return {
        "items": items,
        "next": reached,
        "total": len(trail.items),
        "done": reached >= len(trail.items) and not trail.is_live,
    }
