"""OpenEnv's own server passes, with notes about what lies beyond it."""

import asyncio
from collections.abc import Iterator

import pytest

from end_to_end.processes import Server, free_port, openenv_command, serving
from paddock.testing import check_server

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(60, func_only=True)]

NOTES = {
    "an array keeps the connection",
    "a binary frame keeps the connection",
    "deep json keeps the connection",
    "a step goes on after a dropped socket",
    "a repeated request is not carried out twice",
    "http calls with a session id share an episode",
    "mcp initializes",
    "mcp answers a ping",
    "a notification gets no answer",
    "an invalid request keeps its id",
}
NOTES_ON_TOOLS = {"results have the keys of the specification", "an unknown tool is error 32602"}


@pytest.fixture(scope="module", params=["counter", "echo"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("servers") / "openenv.log"
    with serving("openenv", openenv_command("openenv", request.param, port), port, log) as server:
        yield server


def test_a_stock_server_passes_with_notes(server: Server, request: pytest.FixtureRequest) -> None:
    results = asyncio.run(check_server(server.url))
    assert {result.outcome for result in results} <= {"passed", "info", "skipped"}
    expected = NOTES | NOTES_ON_TOOLS if "echo" in request.node.name else NOTES
    assert {result.name for result in results if result.outcome == "info"} == expected
