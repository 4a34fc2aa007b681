"""An answer that says `success: false` is a failure, whatever its status."""

import asyncio
from typing import Any

import pytest

from paddock.fleet.client.errors import ProtocolError, RequestRefused

from .episodes import EventRecorder, env_on, play
from .plane import LabPlane, lab
from .test_faults import made

REFUSED = {"success": False, "message": "the database is locked"}


UNCONFIRMED = [
    *({}, "done", {"message": "reset"}, {"success": None}, {"success": "false"}),
    *({"success": None, "observation": {}}, {"observation": None}, {"observation": {}, "error": "no such file"}),
    *({"observation": {}, "ok": False}, {"observation": {}, "status": "error"}),
]


@pytest.mark.parametrize("body", [REFUSED, *UNCONFIRMED])
def test_a_used_instance_that_was_not_reset_is_replaced(body: Any) -> None:
    async def main(plane: LabPlane) -> None:
        async with env_on(plane, recorder) as env:
            assert (await play(env, "hello"))[0] == 1.0
            plane.fail("POST", "/reset", 200, body=body)
            reward, _ = await play(env)
            assert reward == 0.0

    recorder = EventRecorder()
    with lab() as plane:
        asyncio.run(main(plane))
        assert len(plane.boxes) == 2
        assert plane.running == []
        assert recorder.count("fleet_env_reset_failed") == 1


def test_a_refusal_without_a_reason_says_that() -> None:
    async def main(plane: LabPlane) -> None:
        orchestrator, _ = await made(plane)
        plane.fail("POST", "/reset", 200, body={"success": False})
        with pytest.raises(RequestRefused, match="refused: no reason given"):
            await orchestrator.reset_async()
        await orchestrator.close_async()

    with lab() as plane:
        asyncio.run(main(plane))


def test_a_fresh_instance_whose_reset_was_refused_says_so() -> None:
    async def main(plane: LabPlane) -> None:
        async with env_on(plane) as env:
            plane.fail("POST", "/reset", 200, body=REFUSED)
            _, info = await play(env, "hello")
            assert "the database is locked" in info["env_reset_failed"]

    with lab() as plane:
        asyncio.run(main(plane))


def test_a_refused_step_and_heartbeat_are_failures_and_a_failed_query_is_an_answer() -> None:
    async def main(plane: LabPlane) -> None:
        orchestrator, _ = await made(plane)
        plane.fail("POST", "/step", 200, body=REFUSED)
        with pytest.raises(RequestRefused, match="locked"):
            await orchestrator.step_async({"move": 1})
        plane.fail("POST", "/heartbeat", 200, body=REFUSED)
        assert orchestrator._fleet_env is not None
        with pytest.raises(RequestRefused):
            await orchestrator._fleet_env.plane.heartbeat(plane.box.id)
        plane.fail("POST", "/query", 200, body={**REFUSED, "error": "no such table"})
        assert (await orchestrator.query_db_async("select 1"))["error"] == "no such table"
        plane.fail("POST", "/reset", 200, body="ok")
        with pytest.raises(ProtocolError, match="without confirming"):
            await orchestrator.reset_async()
        await orchestrator.close_async()

    with lab() as plane:
        asyncio.run(main(plane))
        assert plane.running == []
