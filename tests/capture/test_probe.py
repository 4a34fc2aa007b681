"""What the probe says about an endpoint."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

from capture.harness import run
from capture.scripted_model import ScriptedModel, ok, refusing, status
from paddock.capture.probe import ProbeReport, probe
from paddock.capture.trace import Level
from paddock.capture.upstream import Upstream
from paddock.errors import ModelError
from paddock.models.endpoint import Endpoint


async def report_of(model: ScriptedModel, name: str = "real") -> ProbeReport:
    async with model, Upstream() as upstream:
        return await probe(Endpoint(model.url, name), upstream)


@pytest.mark.parametrize(("engine", "streaming"), [("vllm", True), ("sglang", False), ("llamacpp", False)])
def test_an_engine_that_gives_tokens_is_trainable(engine: str, streaming: bool) -> None:
    async def body() -> None:
        report = await report_of(ScriptedModel(engine=engine))
        assert (report.engine, report.level, report.streaming) == (engine, Level.TOKENS, streaming)
        assert (report.prompt_ids, report.completion_ids, report.logprobs) == (5, 4, 4)
        assert report.models == ["real"]
        assert report.trainable
        assert any("--tokens" in line for line in report.advice) == (engine == "sglang")

    run(body())


def test_what_is_missing_comes_with_advice() -> None:
    async def body() -> None:
        report = await report_of(
            ScriptedModel(refusing("return_token_ids", "logprobs"), engine="silent"), name="other"
        )
        assert (report.level, report.trainable) == (Level.TEXT, False)
        assert {"return_token_ids", "logprobs"} <= set(report.refused)
        assert any("not be trainable" in line for line in report.advice)

    run(body())


def test_an_unlisted_model_and_refused_tools_are_reported() -> None:
    async def step(server: ScriptedModel, request: Any, request_body: dict[str, Any]) -> Any:
        refused = status(400, "tool choice requires --enable-auto-tool-choice")
        return await (refused if "tools" in request_body else ok())(server, request, request_body)

    async def body() -> None:
        report = await report_of(ScriptedModel(step), name="other")
        assert not report.tools
        assert any("tool parser" in line for line in report.advice)
        assert any("'other'" in line for line in report.advice)

    run(body())


def test_an_endpoint_that_does_not_answer_is_a_model_error() -> None:
    async def body() -> None:
        with pytest.raises(ModelError, match="no such model") as raised:
            await report_of(ScriptedModel(status(404, "no such model")))
        assert raised.value.hint == "it serves: real"

    run(body())


def test_the_command_prints_its_report() -> None:
    code = "import sys, paddock.cli.probe as p; sys.exit(p.command.main(sys.argv[1:], standalone_mode=False))"

    async def body() -> None:
        async with ScriptedModel() as model:
            url = model.url.removesuffix("/v1")
            made = await asyncio.to_thread(
                subprocess.run, [sys.executable, "-c", code, url, "--json"], capture_output=True, timeout=20
            )
            output = json.loads(made.stdout)
            assert made.returncode == 0
            assert (output["level"], output["model"], output["trainable"]) == ("tokens", "real", True)

    run(body())
