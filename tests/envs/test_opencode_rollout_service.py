"""The service without an agent: the queue, keys, aborts, the end of a server and the start of the next one.

A model server that accepts and never answers keeps a rollout busy for as long as a test needs.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paddock.envs.opencode.results import status_of
from paddock.envs.opencode.rollout_service import OpenCodeRolloutService, ServiceSettings, UnknownRollout
from paddock.errors import ServerDraining, ToolFailure
from paddock.store import Store
from paddock.store.outcome import Outcome

from .test_opencode_request import request

TOKEN = "hf_never_seen_anywhere"


@asynccontextmanager
async def silent_model() -> AsyncIterator[str]:
    """The URL of a server that says nothing."""
    over = asyncio.Event()

    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        over.set()
        server.close()


def with_service(
    test: Callable[[OpenCodeRolloutService, str], Awaitable[None]], folder: Path, **settings: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), silent_model() as url:
            service = await OpenCodeRolloutService.open(ServiceSettings(store=str(folder), **settings))
            try:
                await test(service, url)
            finally:
                await service.close()

    asyncio.run(main())


async def until(service: OpenCodeRolloutService, rollout_id: str, status: str) -> None:
    after = 0
    while status_of(await service.record(rollout_id)) != status:
        events, done = await service.events(rollout_id, after, 5)
        after = events[-1]["seq"] if events else after
        assert not done


def test_more_rollouts_than_allowed_wait_for_their_turn(tmp_path: Path) -> None:
    async def claim(service: OpenCodeRolloutService, url: str) -> None:
        first = await service.start(request(model_key="", vllm_url=url))
        second = await service.start(request(model_key="", vllm_url=url))
        await until(service, first.rollout_id, "running")
        assert status_of(await service.record(second.rollout_id)) == "queued"
        await service.abort(first.rollout_id)
        await until(service, second.rollout_id, "running")

    with_service(claim, tmp_path, max_rollouts=1)


def test_a_rollout_is_aborted_in_the_queue_and_once_more(tmp_path: Path) -> None:
    async def claim(service: OpenCodeRolloutService, url: str) -> None:
        first = await service.start(request(model_key="", vllm_url=url))
        waiting = await service.start(request(model_key="", vllm_url=url))
        await until(service, first.rollout_id, "running")
        ended = await service.abort(waiting.rollout_id)
        assert (ended.outcome, ended.error) == (Outcome.CANCELLED, "aborted")
        assert await service.abort(waiting.rollout_id) == ended
        assert status_of(await service.record(first.rollout_id)) == "running"

    with_service(claim, tmp_path, max_rollouts=1)


def test_a_key_gives_one_rollout_however_often_it_is_sent(tmp_path: Path) -> None:
    async def claim(service: OpenCodeRolloutService, url: str) -> None:
        wanted = request(model_key="", vllm_url=url, idempotency_key="k")
        started = await asyncio.gather(*(service.start(wanted) for _ in range(5)))
        assert len({record.rollout_id for record in started}) == 1
        await service.abort(started[0].rollout_id)
        assert (await service.start(wanted)).outcome is Outcome.CANCELLED
        with pytest.raises(ToolFailure, match="other arguments"):
            await service.start(request(model_key="", vllm_url=url, idempotency_key="k", thinking=True))

    with_service(claim, tmp_path)


def test_an_unreachable_model_is_an_outcome(tmp_path: Path) -> None:
    async def claim(service: OpenCodeRolloutService, _: str) -> None:
        started = await service.start(request(model_key="", vllm_url="http://127.0.0.1:9", hf_token=TOKEN))
        ended = await service.wait(started.rollout_id, 10)
        assert (ended.outcome, ended.reward) == (Outcome.MODEL, None)
        assert "127.0.0.1:9" in (ended.error or "")
        result = await service.result(ended)
        assert (result.status, result.reward_reason) == ("failed", "not verified: outcome model")
        events, done = await service.events(started.rollout_id, 0, 0)
        assert [event["kind"] for event in events] == ["stage", "outcome"]
        assert done

    with_service(claim, tmp_path)


def test_a_secret_in_an_error_message_is_masked(tmp_path: Path) -> None:
    async def claim(service: OpenCodeRolloutService, url: str) -> None:
        wanted = request(model_key=f"vllm://no model, {TOKEN}", vllm_url=url, hf_token=TOKEN)
        ended = await service.wait((await service.start(wanted)).rollout_id, 10)
        assert ended.outcome is Outcome.MODEL
        assert "***" in (ended.error or "")
        assert TOKEN not in (ended.error or "")

    with_service(claim, tmp_path)


def test_waiting_ends_at_its_deadline_and_the_rollout_does_not(tmp_path: Path) -> None:
    async def claim(service: OpenCodeRolloutService, url: str) -> None:
        started = await service.start(request(model_key="", vllm_url=url))
        assert not (await service.wait(started.rollout_id, 0.05)).finished
        waiting = asyncio.create_task(service.wait(started.rollout_id, 60))
        await until(service, started.rollout_id, "running")
        waiting.cancel()
        await asyncio.wait([waiting])
        assert status_of(await service.record(started.rollout_id)) == "running"

    with_service(claim, tmp_path)


def test_a_rollout_that_outlives_all_its_deadlines_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def claim(service: OpenCodeRolloutService, url: str) -> None:
        wanted = request(model_key="", vllm_url=url)
        monkeypatch.setattr("paddock.envs.opencode.request.MARGIN_SECONDS", 60.2 - wanted.seconds)
        ended = await service.wait((await service.start(wanted)).rollout_id, 10)
        assert (ended.outcome, ended.finished) == (Outcome.ENVIRONMENT, True)
        assert "0.2 s" in (ended.error or "")

    with_service(claim, tmp_path)


def test_waiting_calls_see_an_abort(tmp_path: Path) -> None:
    async def claim(service: OpenCodeRolloutService, url: str) -> None:
        started = await service.start(request(model_key="", vllm_url=url))
        waiting = asyncio.create_task(service.wait(started.rollout_id, 60))
        await until(service, started.rollout_id, "running")
        await service.abort(started.rollout_id)
        assert (await waiting).outcome is Outcome.CANCELLED

    with_service(claim, tmp_path)


def test_an_unknown_id_is_refused(tmp_path: Path) -> None:
    async def claim(service: OpenCodeRolloutService, _: str) -> None:
        for ask in (service.record, service.abort, service.messages):
            with pytest.raises(UnknownRollout, match="no rollout 'rnope'"):
                await ask("rnope")

    with_service(claim, tmp_path)


def test_closing_the_service_cancels_all_rollouts_and_takes_no_more(tmp_path: Path) -> None:
    async def claim(service: OpenCodeRolloutService, url: str) -> None:
        running = await service.start(request(model_key="", vllm_url=url))
        await until(service, running.rollout_id, "running")
        queued = await service.start(request(model_key="", vllm_url=url))
        await service.close()
        with pytest.raises(ServerDraining):
            await service.start(request(model_key="", vllm_url=url))
        with Store.open(tmp_path, read_only=True) as store:
            for started in (running, queued):
                stored = store.get(started.rollout_id)
                assert stored is not None
                assert (stored.outcome, stored.error) == (Outcome.CANCELLED, "the server was shut down")

    with_service(claim, tmp_path, max_rollouts=1)


KILLED = """
import asyncio, os, signal, sys
from envs.test_opencode_rollout_service import OpenCodeRolloutService, ServiceSettings, request, silent_model

async def main():
    async with silent_model() as url:
        service = await OpenCodeRolloutService.open(ServiceSettings(store=sys.argv[1], max_rollouts=1))
        for key in ("running", "queued"):
            await service.start(request(model_key="", vllm_url=url, idempotency_key=key))
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_what_a_killed_server_had_accepted_has_an_outcome_afterwards(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    environ = {**os.environ, "PYTHONPATH": str(tests)}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environ, timeout=30, check=False)
    assert killed.returncode == -9

    async def claim(service: OpenCodeRolloutService, _: str) -> None:
        for key in ("running", "queued"):
            rollout_id = request(idempotency_key=key).rollout_id
            assert rollout_id is not None
            assert (await service.record(rollout_id)).outcome is Outcome.CANCELLED
            events, done = await service.events(rollout_id, 0, 0)
            assert events[-1]["kind"] == "outcome"
            assert done

    with_service(claim, tmp_path)
