"""What each call was for."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from capture.harness import TOOLS, run, start_proxy
from capture.scripted_model import ScriptedModel, ok, status
from paddock.capture.roles import Roles
from paddock.capture.trace import Role

USER = {"role": "user", "content": "do it"}
SAID = {"role": "assistant", "content": "done"}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def tell(roles: Roles, *messages: dict[str, str], tools: bool = True, session: str | None = "s") -> Role:
    headers = {"x-session-id": session} if session else {}
    return roles.classify({"messages": list(messages), **({"tools": TOOLS} if tools else {})}, headers)


def test_an_agent_with_tools_and_its_side_calls() -> None:
    roles = Roles()
    title = system("You are a title generator. You output ONLY a thread title.")
    assert tell(roles, title, USER, tools=False) is Role.TITLE
    assert tell(roles, USER) is Role.AGENT
    assert tell(roles, USER, SAID, USER) is Role.AGENT
    assert tell(roles, system("Summarise"), USER, SAID, USER, tools=False) is Role.COMPACTION
    assert tell(roles, system("Write a summary"), USER, tools=False) is Role.COMPACTION
    assert tell(roles, USER, tools=False) is Role.AGENT
    assert tell(roles, USER, SAID, USER, tools=False) is Role.AGENT
    assert tell(roles, USER, session="other") is Role.SUBAGENT
    assert tell(roles, USER) is Role.AGENT


def test_an_agent_that_never_sends_tools_is_the_agent() -> None:
    roles = Roles()
    assert tell(roles, system("You edit code"), USER, tools=False) is Role.AGENT
    assert tell(roles, system("You edit code"), USER, SAID, USER, tools=False) is Role.AGENT


def test_a_system_prompt_in_parts_is_read() -> None:
    parts = [{"type": "text", "text": "Generate a short title for this conversation."}]
    body = {"messages": [{"role": "system", "content": parts}]}
    assert Roles().classify(body, {}) is Role.TITLE


def test_a_prompt_that_only_mentions_titles_is_no_title() -> None:
    assert tell(Roles(), system("You are a coding agent. Keep the title short."), USER, tools=False) is Role.AGENT


def test_session_affinity_names_the_session_too() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            await proxy.chat("one", tools=TOOLS, headers={"x-session-affinity": "a"})
            await proxy.chat("two", tools=TOOLS, headers={"x-session-affinity": "b"})
            await proxy.last_call()
            assert [(call.role, call.session) for call in proxy.capture.calls] == [
                (Role.AGENT, "a"),
                (Role.SUBAGENT, "b"),
            ]

    run(body())


def test_a_classifier_of_the_agents_own_goes_first_and_may_fall_back() -> None:
    def classify(body: dict[str, Any], headers: Mapping[str, str]) -> Role | None:
        if body["messages"][0]["content"] == "break":
            raise ValueError("oops")
        return Role.COMPACTION if body["messages"][0]["content"] == "c" else None

    async def body() -> None:
        async with start_proxy(ScriptedModel(), classify=classify) as proxy:
            for text in ("c", "other", "break"):
                await proxy.chat(text)
            await proxy.last_call()
            assert [call.role for call in proxy.capture.calls] == [Role.COMPACTION, Role.AGENT, Role.AGENT]
            assert "oops" in proxy.capture.log_tail()

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompt_sampled_five_times_gives_five_answers_to_train_on(stream: bool) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(ok())) as proxy:
            await asyncio.gather(*(proxy.chat("vote", stream=stream) for _ in range(3)))
            for _ in range(2):
                await proxy.chat("vote", stream=stream)
            await proxy.wait_until(lambda: len(proxy.recorded) == 5)
            assert [(call.role, call.trainable, call.parent) for call in proxy.recorded] == [
                (Role.AGENT, True, None)
            ] * 5
            assert len({call.id for call in proxy.recorded}) == 5

    run(body())


def test_an_answer_that_was_cut_off_is_retried_once_the_same_is_asked_again() -> None:
    async def body() -> None:
        release = asyncio.Event()

        async def slow(server: ScriptedModel, request: Any, request_body: dict[str, Any]) -> Any:
            await release.wait()
            return await ok()(server, request, request_body)

        async with start_proxy(ScriptedModel(slow, ok())) as proxy:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await proxy.chat("once")
            await proxy.wait_until(lambda: len(proxy.recorded) == 1)
            assert (proxy.recorded[0].role, proxy.recorded[0].aborted) == (Role.AGENT, True)
            await proxy.chat("once")
            await proxy.wait_until(lambda: len(proxy.recorded) == 3)
            release.set()
            assert [(call.id, call.role) for call in proxy.recorded[1:]] == [("c0", Role.RETRIED), ("c1", Role.AGENT)]
            assert [call.trainable for call in proxy.capture.calls] == [False, True]

    run(body())


def test_a_call_that_breaks_after_the_same_was_asked_again_is_retried() -> None:
    async def body() -> None:
        broken = asyncio.Event()

        async def breaks(server: ScriptedModel, request: Any, request_body: dict[str, Any]) -> Any:
            await broken.wait()
            return await status(400)(server, request, request_body)

        async with start_proxy(ScriptedModel(breaks, ok())) as proxy:
            first = asyncio.create_task(proxy.chat("twice"))
            await proxy.wait_until(lambda: bool(proxy.capture.calls))
            await proxy.chat("twice")
            broken.set()
            await first
            await proxy.wait_until(lambda: len(proxy.recorded) == 2)
            assert [(call.id, call.role) for call in proxy.recorded] == [("c1", Role.AGENT), ("c0", Role.RETRIED)]

    run(body())


def test_a_title_asked_again_stays_a_title() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            for _ in range(2):
                await proxy.chat(messages=[system("You are a title generator")])
            await proxy.last_call()
            assert [call.role for call in proxy.capture.calls] == [Role.TITLE, Role.TITLE]

    run(body())
