"""Following rollouts while they are written, by another connection than the page's, and stopping them."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddock.capture.trace import Call, Event
from paddock.config import Access
from paddock.store import Owner, Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.web.mounts import create_view_app
from paddock.web.read_store import ReadStore

from .browser import TOKEN, Browser, events


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path) as opened:
        yield opened


@pytest.fixture
def watcher(writer: Store) -> Iterator[Browser]:
    app = create_view_app(ReadStore(writer.path), Access(token=TOKEN))
    yield Browser(app)
    app.state.page.close()


def begun(writer: Store, name: str = "r-live") -> RolloutRecord:
    record = RolloutRecord(name, "task", started_at=time.time())
    writer.begin(record)
    return record


def say(writer: Store, name: str, what: str, **data: Any) -> None:
    writer.add_event(name, Event(time.time(), what, data))


def save(writer: Store, name: str, index: int, messages: list[dict[str, Any]], text: str) -> Call:
    call = Call(f"c{index}", index, request={"messages": messages}, message={"role": "assistant", "content": text})
    call.started = call.ended = time.time()
    writer.save_call(name, call)
    say(writer, name, "call", call=call.id)
    return call


async def next_of(stream: Any, name: str) -> Any:
    """The next event of that name."""
    async with asyncio.timeout(10):
        async for event_name, document in stream:
            if event_name == name:
                return document
    raise AssertionError(f"the stream ended without {name}")


def test_a_rollout_is_followed_to_its_end(writer: Store, watcher: Browser) -> None:
    async def follow() -> None:
        record = begun(writer)
        async with watcher.asking("GET", "/web/api/rollouts/r-live/live") as (status, headers, pieces):
            assert status == 200
            assert dict(headers)["content-type"].startswith("text/event-stream")
            stream = events(pieces)
            assert (await next_of(stream, "summary"))["live"] is True
            say(writer, "r-live", "stage", stage="agent")
            items = (await next_of(stream, "items"))["items"]
            assert [item["text"] for item in items] == ["stage: agent"]
            say(writer, "r-live", "agent_text", kind="text", text="thinking aloud")
            [ahead] = (await next_of(stream, "items"))["items"]
            assert (ahead["kind"], ahead["seq"], ahead["text"]) == ("event", None, "thinking aloud")
            save(writer, "r-live", 0, [{"role": "user", "content": "Go."}], "thinking aloud, and done")
            assert [call["id"] for call in (await next_of(stream, "calls"))["calls"]] == ["c0"]
            update = await next_of(stream, "items")
            assert [(item["seq"], item["role"]) for item in update["items"]] == [(1, "user"), (2, "assistant")]
            assert update["next"] == 3
            record.outcome, record.reward = Outcome.OK, 1.0
            writer.finish(record)
            say(writer, "r-live", "outcome", outcome="ok")
            assert (await next_of(stream, "summary"))["reward"] == 1.0
            assert (await next_of(stream, "done"))["outcome"] == "ok"
            assert [each async for each in stream] == []

    asyncio.run(follow())


def test_a_listener_gets_only_what_is_new(writer: Store, watcher: Browser) -> None:
    async def follow() -> None:
        begun(writer)
        for stage in ("sandbox", "setup", "agent"):
            say(writer, "r-live", "stage", stage=stage)
        async with watcher.asking("GET", "/web/api/rollouts/r-live/live?after=2") as (_, _, pieces):
            items = (await next_of(events(pieces), "items"))["items"]
            assert [item["text"] for item in items] == ["stage: agent"]

    asyncio.run(follow())


def test_news_come_within_a_quarter_of_a_second(writer: Store, watcher: Browser) -> None:
    async def follow() -> list[float]:
        begun(writer)
        async with watcher.asking("GET", "/web/api/rollouts/r-live/live") as (_, _, pieces):
            stream = events(pieces)
            await next_of(stream, "summary")
            delays = []
            for number in range(8):
                began = time.perf_counter()
                await asyncio.to_thread(say, writer, "r-live", "warning", warning=str(number))
                await next_of(stream, "items")
                delays.append(time.perf_counter() - began)
            return sorted(delays)

    # The median: machines that run tests are busy.
    assert asyncio.run(follow())[4] < 0.25


def test_the_table_is_followed(writer: Store, watcher: Browser) -> None:
    async def follow() -> None:
        begun(writer, "r-before")
        async with watcher.asking("GET", "/web/api/live") as (_, _, pieces):
            stream = events(pieces)
            await next_of(stream, "hello")
            record = begun(writer, "r-after")
            assert [row["rollout_id"] for row in (await next_of(stream, "rows"))["rows"]] == ["r-after"]
            record.outcome = Outcome.OK
            writer.finish(record)
            assert [row["outcome"] for row in (await next_of(stream, "rows"))["rows"]] == ["ok"]

    asyncio.run(follow())


def test_the_store_is_not_polled_without_listeners(writer: Store, watcher: Browser) -> None:
    async def follow() -> None:
        begun(writer)
        changes = watcher.app.state.page.watcher
        for path in ("/web/api/live", "/web/api/rollouts/r-live/live"):
            async with watcher.asking("GET", path) as (_, _, pieces):
                await anext(events(pieces))
                assert changes.is_polling
            assert not changes.is_polling

    asyncio.run(follow())


def test_streams_of_listeners_end_when_the_page_stops(writer: Store, watcher: Browser) -> None:
    async def follow() -> None:
        async with watcher.asking("GET", "/web/api/live") as (_, _, pieces):
            stream = events(pieces)
            await next_of(stream, "hello")
            watcher.app.state.page.stop()
            async with asyncio.timeout(2):
                assert [each async for each in stream] == []

    asyncio.run(follow())


def test_a_rollout_of_a_dead_process_is_not_live(writer: Store, watcher: Browser) -> None:
    begun(writer)
    owner = Owner.from_text(writer._owner.to_text())
    gone = Owner(owner.pid, 1, owner.boot_id, owner.hostname, owner.pid_namespace).to_text()
    with writer._database.write() as connection:
        connection.execute("UPDATE rollouts SET owner = ?", (gone,))
    answer = watcher.api("rollouts/r-live")
    assert (answer["live"], answer["orphan"]) == (False, True)
    answer = watcher.post("/web/api/rollouts/r-live/abort")
    assert answer.status == 409
    assert "is gone" in answer.json()["error"]["message"]


def test_asking_to_stop_leaves_word_for_the_process_that_runs_it(writer: Store, watcher: Browser) -> None:
    begun(writer)
    assert watcher.post("/web/api/rollouts/r-live/abort").json() == {"asked": True}
    assert writer.aborts.reason_for("r-live") == "stopped from the page"
    assert (writer.path / "aborts").stat().st_mode & 0o777 == 0o700
    writer.aborts.clear("r-live")
    assert writer.aborts.reason_for("r-live") is None
    assert os.listdir(writer.path / "aborts") == []


def test_a_large_answer_of_a_running_rollout_grows(writer: Store, watcher: Browser) -> None:
    begun(writer)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    for index in range(60):
        call = save(writer, "r-live", index, list(messages), f"said {index}")
        messages += [call.message, {"role": "user", "content": f"more {index}"}]
        answer = watcher.api("rollouts/r-live/transcript?limit=5000")
        assert [item["text"] for item in answer["items"][-2:]] == [messages[-3]["content"], f"said {index}"]
        assert answer["total"] == 2 * (index + 1)
        assert answer["done"] is False
