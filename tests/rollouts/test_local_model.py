"""What is said before an agent with a long prompt meets a local model."""

import asyncio

import pytest
from aiohttp import web

from paddock.agents import load_agent
from paddock.capture.upstream import Upstream
from paddock.models.endpoint import Endpoint
from paddock.rollouts import local_model
from paddock.rollouts.local_model import warn_of_long_prompt


def warn(agent: str, rate: float | None, label: str = "local") -> str | None:
    """The line for an agent, where the engine reports that it reads so many tokens per second."""

    async def complete(_: web.Request) -> web.Response:
        return web.json_response({} if rate is None else {"timings": {"prompt_per_second": rate}})

    async def ask() -> str | None:
        application = web.Application()
        application.router.add_post("/completion", complete)
        runner = web.AppRunner(application)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            endpoint = Endpoint(f"http://{host}:{port}/v1", "model", label=label, engine="llamacpp")
            async with Upstream() as upstream:
                return await warn_of_long_prompt(load_agent(agent), endpoint, upstream)
        finally:
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(ask(), 30))


def test_the_wait_is_estimated_and_a_shorter_agent_suggested() -> None:
    line = warn("claude-code", rate=100.0) or ""
    assert "about 49 s until its first answer" in line
    assert "--agent mini-swe-agent" in line


def test_a_prompt_beyond_the_context_is_a_warning() -> None:
    assert (warn("qwen-code", rate=1e6) or "").startswith("warning: the first prompt of qwen-code")


@pytest.mark.parametrize(("rate", "label"), [(1e6, "local"), (None, "local"), (1.0, "http://host/v1")])
def test_a_short_wait_or_another_endpoint_gives_no_message(rate: float | None, label: str) -> None:
    assert warn("pi", rate, label) is None


def test_an_agent_of_unknown_size_is_not_measured() -> None:
    assert local_model.suggest_shorter(load_agent("mini-swe-agent")) == "Other agents send more."
    assert warn("loop", rate=1.0) is None
