"""The shipped suite on every dialect, in front of every kind of inference engine."""

import asyncio

import pytest

from capture.dialects.replay_proxy import replay_proxy
from paddock.capture.dialects import DIALECTS
from paddock.capture.trace import Level
from paddock.limits import Budget
from paddock.testing.conformance import failed
from paddock.testing.dialects import CALLS, SCRIPT, check_dialect

COUNTING_ENGINES = {"vllm", "llamacpp"}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_dialect_conforms(dialect: str, engine: str) -> None:
    async def body() -> None:
        async with replay_proxy({**SCRIPT, "engine": engine}, budget=Budget(calls=CALLS)) as proxy:
            results = await check_dialect(dialect, proxy.url, proxy.capture.secret)
            wrong = [(result.name, result.detail) for result in failed(results)]
            assert [each for each in wrong if engine in COUNTING_ENGINES or "count" not in each[0]] == []
            skipped = {result.name for result in results if result.outcome == "skipped"}
            assert skipped <= {"tokens are counted"}
            answered = [call for call in proxy.capture.calls if call.ok]
            assert len(answered) == CALLS
            assert {call.dialect for call in answered} == {dialect}
            if engine == "llamacpp":
                return  # it loses a token wherever a letter has two
            assert {call.level for call in answered} == {Level.TOKENS}
            sent = {
                (*each.prompt_ids, *each.sampled_ids): each.logprobs for each in proxy.model.log if each.status == 200
            }
            for call in answered:
                assert sent[(*call.prompt_token_ids, *call.completion_token_ids)] == call.logprobs

    asyncio.run(asyncio.wait_for(body(), 60))
