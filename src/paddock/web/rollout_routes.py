"""The API routes about rollouts: the table and its statistics, one rollout in detail, and live updates."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.routing import Route

from paddock.export import FORMS
from paddock.export.policy import Policy
from paddock.store import reward_series, search, transcripts
from paddock.web import (
    branches,
    call_changes,
    calls,
    compare,
    detail,
    downloads,
    live,
    parameters,
    share,
    stats,
    tokens,
)
from paddock.web.read_store import EXPORTS, ROLLOUTS, ReadStore, summaries
from paddock.web.responses import PageConflict, PageError, event_stream, handle_errors, json_response

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    from starlette.requests import Request

    from paddock.store.search import Order, Search
    from paddock.web.live import ChangeWatcher
    from paddock.web.loaded_rollout import LoadedRollout
    from paddock.web.static_files import Assets

PAGE_NAMES = ("sort", "order", "offset", "limit")
DEFAULT_ITEMS = 500
MAX_ITEMS = 5000
DEFAULT_TOKENS = 4000
MAX_TOKENS = 50_000
MAX_MEMBERS = 256


class RolloutRoutes:
    def __init__(
        self, store: ReadStore, watcher: ChangeWatcher, assets: Assets, about: Callable[[], dict[str, Any]]
    ) -> None:
        self.store = store
        self.watcher = watcher
        self.assets = assets
        self.about = about

    def routes(self) -> list[Route]:
        one = "/api/rollouts/{id}"
        endpoints = [
            ("/api/rollouts", self.table),
            ("/api/facets", self.facets),
            ("/api/stats", self.stats),
            ("/api/learning", self.learning),
            ("/api/batches", self.batches),
            ("/api/causes", self.causes),
            ("/api/groups", self.groups),
            ("/api/forms", self.forms),
            ("/api/export", self.export),
            ("/api/compare", self.compare),
            ("/api/compare/files", self.compare_files),
            ("/api/live", self.live),
            (one, self.one),
            (f"{one}/transcript", self.transcript),
            (f"{one}/calls", self.calls),
            (f"{one}/calls/{{call}}", self.call),
            (f"{one}/calls/{{call}}/tokens", self.tokens),
            (f"{one}/calls/{{call}}/changes", self.call_changes),
            (f"{one}/tools", self.tools),
            (f"{one}/entropy", self.entropy),
            (f"{one}/tree", self.tree),
            (f"{one}/files", self.files),
            (f"{one}/changes", self.changes),
            (f"{one}/snapshots", self.snapshots),
            (f"{one}/live", self.follow),
            (f"{one}/share", self.share),
        ]
        return [
            *(Route(path, handle_errors(endpoint), methods=["GET"]) for path, endpoint in endpoints),
            Route(f"{one}/abort", handle_errors(self.abort), methods=["POST"]),
            Route("/api/tags", handle_errors(self.change_tags), methods=["POST"]),
        ]

    # -- many ---------------------------------------------------------------------------------------

    async def table(self, request: Request) -> Response:
        parameters.check_names(request, (*parameters.SEARCH_NAMES, *PAGE_NAMES))
        condition, (sort, order), (offset, limit) = (
            parameters.read_search(request),
            parameters.sorting(request),
            parameters.paging(request),
        )
        total, rows, pending = await self.store.query(_table, condition, sort, order, offset, limit)
        if pending:
            self.store.start_indexing()
        return json_response(request, {"total": total, "offset": offset, "rows": rows, "not_indexed": pending})

    async def facets(self, request: Request) -> Response:
        parameters.check_names(request, ())
        return json_response(request, await self.store.cached_query(search.facets))

    async def stats(self, request: Request) -> Response:
        parameters.check_names(request, parameters.SEARCH_NAMES)
        return json_response(request, await self.store.cached_query(stats.stats, parameters.read_search(request)))

    async def learning(self, request: Request) -> Response:
        parameters.check_names(request, (*parameters.SEARCH_NAMES, "by", "split"))
        axis = parameters.choice(request, "by", reward_series.AXES, "time")
        is_split = parameters.text(request, "split") is not None
        split = parameters.choice(request, "split", reward_series.SPLITS, "task") if is_split else None
        condition = parameters.read_search(request)
        return json_response(request, await self.store.cached_query(stats.learning, condition, axis, split))

    async def batches(self, request: Request) -> Response:
        parameters.check_names(request, ("batch", "offset", "limit"))
        offset, limit = parameters.paging(request, 50)
        batch = parameters.text(request, "batch")
        return json_response(request, await self.store.cached_query(stats.list_batches, batch, offset, limit))

    async def causes(self, request: Request) -> Response:
        parameters.check_names(request, parameters.SEARCH_NAMES)
        condition = parameters.read_search(request)
        return json_response(request, await self.store.cached_query(stats.list_causes, condition))

    async def groups(self, request: Request) -> Response:
        parameters.check_names(request, ("task", "batch", "offset", "limit"))
        offset, limit = parameters.paging(request, 50)
        task, batch = parameters.text(request, "task"), parameters.text(request, "batch")
        return json_response(request, await self.store.cached_query(_groups, task, batch, offset, limit))

    async def forms(self, request: Request) -> Response:
        parameters.check_names(request, ())
        return json_response(request, {"forms": await asyncio.to_thread(downloads.list_forms)})

    async def export(self, request: Request) -> Response:
        """The filtered rollouts in a form of `paddock trace export`, as a file."""
        parameters.check_names(request, (*parameters.SEARCH_NAMES, "form", "unscored"))
        form = parameters.choice(request, "form", FORMS, "jsonl")
        policy = Policy(unscored="flag" if parameters.flag(request, "unscored") else "exclude")
        condition = replace(parameters.read_search(request), running=False)
        store = await self.store.open(EXPORTS)
        return await store.run(downloads.export, store, form, condition, policy)

    async def change_tags(self, request: Request) -> Response:
        """`{"rollouts": […], "add": […], "remove": […]}`: the tags that each of the rollouts has then."""
        rollout_ids, add, remove = await parameters.read_tag_change(request)
        changed = await self.store.write(lambda store: store.change_tags(rollout_ids, add=add, remove=remove))
        return json_response(request, {"tags": changed})

    async def live(self, request: Request) -> Response:
        await self.store.open()
        return event_stream(live.follow_table(self.store, self.watcher))

    async def compare(self, request: Request) -> Response:
        return await self._compare(request, compare.compare)

    async def compare_files(self, request: Request) -> Response:
        return await self._compare(request, compare.compare_files)

    async def _compare(self, request: Request, function: Callable[..., Any]) -> Response:
        parameters.check_names(request, ("a", "b"))
        first, second = parameters.text(request, "a"), parameters.text(request, "b")
        if first is None or second is None:
            raise PageError("two rollouts are needed", hint="give a=ID&b=ID")
        other = await self.store.load_rollout(second)
        return json_response(request, await self.store.query_rollout(first, function, other))

    # -- one ----------------------------------------------------------------------------------------

    async def one(self, request: Request) -> Response:
        return json_response(request, await self._with(request, detail.describe))

    async def transcript(self, request: Request) -> Response:
        parameters.check_names(request, ("after", "limit"))
        after = parameters.integer(request, "after", 0, 0, parameters.MAX_OFFSET)
        limit = parameters.integer(request, "limit", DEFAULT_ITEMS, 1, MAX_ITEMS)
        return json_response(request, await self._with(request, _items, after, limit))

    async def calls(self, request: Request) -> Response:
        return json_response(request, {"calls": await self._with(request, calls.list_calls)})

    async def call(self, request: Request) -> Response:
        return json_response(
            request, await self._with(request, calls.describe_call, parameters.path_text(request, "call"))
        )

    async def tokens(self, request: Request) -> Response:
        parameters.check_names(request, ("part", "offset", "limit"))
        part = parameters.choice(request, "part", tokens.PARTS, "completion")
        offset = parameters.integer(request, "offset", 0, 0, parameters.MAX_OFFSET)
        limit = parameters.integer(request, "limit", DEFAULT_TOKENS, 1, MAX_TOKENS)
        call = parameters.path_text(request, "call")
        return json_response(request, await self._with(request, tokens.token_page, call, part, offset, limit))

    async def tools(self, request: Request) -> Response:
        return json_response(request, await self._with(request, _tools))

    async def entropy(self, request: Request) -> Response:
        parameters.check_names(request, ("call",))
        call = parameters.text(request, "call")
        if call is None:
            raise PageError("no call is named", hint="give call=c0")
        return json_response(request, await self._with(request, tokens.uncertainty_curve, call))

    async def tree(self, request: Request) -> Response:
        return json_response(request, await self._with(request, branches.describe_tree))

    async def files(self, request: Request) -> Response:
        parameters.check_names(request, ("path", "of"))
        path = parameters.text(request, "path")
        archive = parameters.choice(request, "of", detail.FILE_ARCHIVES, detail.FILE_ARCHIVES[0])
        if path is None:
            raise PageError("no file is named", hint="give path=…")
        return json_response(request, await self._with(request, detail.read_file, path, archive))

    async def changes(self, request: Request) -> Response:
        return json_response(request, await self._with(request, detail.file_changes))

    async def snapshots(self, request: Request) -> Response:
        return json_response(request, await self._with(request, call_changes.list_call_changes))

    async def call_changes(self, request: Request) -> Response:
        call = parameters.path_text(request, "call")
        return json_response(request, await self._with(request, call_changes.describe_call_changes, call))

    async def follow(self, request: Request) -> Response:
        parameters.check_names(request, ("after",))
        after = parameters.integer(request, "after", 0, 0, parameters.MAX_OFFSET)
        rollout = await self.store.load_rollout(parameters.path_text(request, "id"))
        return event_stream(live.follow_rollout(self.store, self.watcher, rollout.id, after))

    async def abort(self, request: Request) -> Response:
        """Request that a running rollout stops, in whatever process it runs."""
        rollout = await self.store.load_rollout(parameters.path_text(request, "id"))
        if rollout.is_finished:
            raise PageConflict(
                f"rollout {rollout.id} has ended: {rollout.head['outcome']}", hint="there is nothing to stop"
            )
        if rollout.is_orphan:
            hint = "the next command that writes to this store gives it its outcome"
            raise PageConflict(f"the process that ran {rollout.id} is gone", hint=hint)
        store = await self.store.open(ROLLOUTS)
        await store.run(store.aborts.request, rollout.id, "stopped from the page")
        return json_response(request, {"asked": True})

    async def share(self, request: Request) -> Response:
        name, content = await self.render_share(parameters.path_text(request, "id"))
        headers = {
            "content-disposition": f'attachment; filename="{name}.html"',
            "cache-control": "no-store",
        }
        return Response(content, 200, headers, "text/html; charset=utf-8")

    async def render_share(self, rollout_id: str) -> tuple[str, bytes]:
        """The whole id of a rollout, and its page as one file."""
        about = {**self.about(), "store": None, "can_abort": False}
        about["parts"] = {**about["parts"], "play": False, "server": False, "fleet": False}
        data = await self.store.query_rollout(rollout_id, share.collect_answers, about)
        name = str(data["id"])
        title = f"{name} · {data['answers'][f'rollouts/{name}']['task_id']}"
        return name, share.render_page(self.assets, title, data)

    async def _with(self, request: Request, function: Callable[..., Any], *args: Any) -> Any:
        return await self.store.query_rollout(parameters.path_text(request, "id"), function, *args)


def _table(
    connection: sqlite3.Connection, condition: Search, sort: str, order: Order, offset: int, limit: int
) -> tuple[int, list[dict[str, Any]], int]:
    """How many rollouts match, a page of them, and how many a search of transcripts leaves out."""
    looked_up = search.find(connection, condition)
    keys = search.page(connection, looked_up, sort=sort, order=order, offset=offset, limit=limit)
    page, total = summaries(connection, keys), search.count(connection, looked_up)
    if condition.words is None:
        return total, page, 0
    for key, row in zip(keys, page, strict=True):
        row["match"] = transcripts.snippet(connection, key, condition.words)
    return total, page, transcripts.count_pending(connection)


def _groups(
    connection: sqlite3.Connection, task: str | None, batch: str | None, offset: int, limit: int
) -> dict[str, Any]:
    total, groups = search.groups(
        connection, task=task, batch=batch, offset=offset, limit=limit, max_members=MAX_MEMBERS
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
            for group in groups
        ],
    }


def _tools(connection: sqlite3.Connection, rollout: LoadedRollout) -> dict[str, Any]:
    return {"tools": [span.to_json() for span in rollout.tools.spans]}


def _items(connection: sqlite3.Connection, rollout: LoadedRollout, after: int, limit: int) -> dict[str, Any]:
    items = rollout.items[after : after + limit]
    next_item = after + len(items)
    return {
        "items": items,
        "next": next_item,
        "total": len(rollout.items),
        "done": next_item >= len(rollout.items) and not rollout.is_live,
    }
