"""Token mode in every dialect, with clients that send answers back as programs do."""

import json
from itertools import pairwise

import pytest

from capture.harness import run
from capture.token_engine import tool_call
from capture.tokens.harness import LISTING, check_ids, continues, token_proxy
from paddock.capture.dialects import DIALECTS
from paddock.testing.dialect_clients import CLIENTS
from paddock.testing.dialects import DialectSubject

TURNS = [
    LISTING + tool_call("bash", command="ls 'ä'") + "\n" + tool_call("bash", depth=1.0, command="pwd"),
    'Odd.\n<tool_call>\n{"name": "bash", "arguments": ["no", "object"]}\n</tool_call>',
    "<think>\n\n</think>\n\n" + tool_call("bash", command="id"),
    "All seen.",
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_agent_of_any_dialect_has_one_sample(dialect: str, stream: bool) -> None:
    async def body() -> None:
        async with token_proxy(lambda prompt, calls: TURNS[calls]) as proxy:
            subject = DialectSubject(CLIENTS[dialect], proxy.url, proxy.capture.secret, proxy.session)
            conversation = subject.client.user_turn("Look around.")
            reply, document = await subject.send(conversation, stream=stream)
            assert (reply.thinking, reply.text) == ("I should look at the rollouts first.", "Listing the files now.")
            assert [call.arguments["command"] for call in reply.calls] == ["ls 'ä'", "pwd"]
            while reply.calls:
                # As a program that is written in JavaScript sends it back: 1.0 has become 1.
                document = json.loads(json.dumps(document).replace("1.0", "1"))
                conversation += subject.client.reply_turn(document)
                conversation += subject.client.result_turn(reply.calls, ["done"] * len(reply.calls))
                reply, document = await subject.send(conversation, stream=stream)
            assert reply.text == "All seen."
            await proxy.wait_until(lambda: len(proxy.recorded) == len(TURNS))
            calls = proxy.capture.calls
            assert all(continues(later, earlier) for earlier, later in pairwise(calls))
            check_ids(proxy)

    run(body())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_refusal_has_the_form_of_the_dialect(dialect: str) -> None:
    async def body() -> None:
        async with token_proxy(lambda prompt, calls: "", "openai") as proxy:
            subject = DialectSubject(CLIENTS[dialect], proxy.url, proxy.capture.secret, proxy.session)
            _, document = await subject.send_refused(subject.request("hello"))
            assert "token mode needs vLLM" in subject.client.read_error(document)

    run(body())
