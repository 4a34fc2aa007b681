"""Conversations of an agent in token mode: what is sent to the engine, what the agent gets, what is stored."""

import json
from typing import Any

import pytest

from capture import token_engine
from capture.harness import TOOLS, run
from capture.token_engine import Reply, tool_call
from capture.tokens.harness import LISTING, SYSTEM, check_ids, continues, prompt_text, send, token_proxy

ENGINES = ("vllm", "sglang", "llamacpp")
USER = {"role": "user", "content": "List the rollouts."}


def listing_then_text(prompt: str, calls: int) -> str:
    return LISTING + tool_call("bash", command="ls", depth=1.0) if calls % 2 == 0 else "Seen, ünïcode 🙂 and all."


def result(message: dict[str, Any], text: str = "a.txt") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_conversation_is_one_sequence_of_ids(engine: str, stream: bool) -> None:
    async def body() -> None:
        async with token_proxy(listing_then_text, engine) as proxy:
            messages = [SYSTEM, USER]
            for _ in range(3):
                first = await send(proxy, messages, tools=TOOLS, stream=stream)
                assert (first.finish_reason, first.message["content"]) == ("tool_calls", "Listing the files now.")
                assert first.message["reasoning_content"] == "I should look at the rollouts first."
                messages = [*messages, first.message, result(first.message)]
                second = await send(proxy, messages, tools=TOOLS, stream=stream)
                assert second.message["content"] == "Seen, ünïcode 🙂 and all."
                assert continues(second, first)
                messages = [*messages, second.message, {"role": "user", "content": "Once more."}]
            check_ids(proxy)
            modes = [call.token_mode for call in proxy.capture.calls]
            assert [mode["render"] for mode in modes if mode] == ["first"] + ["bridge"] * 5
            assert {(call.temperature, call.finish_reason) for call in proxy.capture.calls} == {
                (1.0, "tool_calls"),
                (1.0, "stop"),
            }

    run(body())


def test_sglang_events_with_new_tokens_only_are_read() -> None:
    async def body() -> None:
        async with token_proxy(listing_then_text, "sglang", cumulative=False) as proxy:
            call = await send(proxy, [SYSTEM, USER], tools=TOOLS, stream=True)
            assert call.weight_version == "step-7"
            check_ids(proxy)

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_a_vllm_without_completions_is_asked_to_generate(stream: bool) -> None:
    async def body() -> None:
        async with token_proxy(listing_then_text, missing_path="/v1/completions") as proxy:
            first = await send(proxy, [SYSTEM, USER], tools=TOOLS, stream=stream)
            assert [each["status"] for each in first.attempts] == [404]
            second = await send(proxy, [SYSTEM, USER, first.message, result(first.message)], tools=TOOLS)
            assert (second.attempts, continues(second, first)) == ([], True)
            check_ids(proxy)

    run(body())


def test_what_agents_spell_in_another_way_is_no_edit() -> None:
    """Dropped reasoning, other ids of tool calls, other JSON, trimmed text, a list of parts."""

    async def body() -> None:
        async with token_proxy(listing_then_text) as proxy:
            first = await send(proxy, [SYSTEM, USER], tools=TOOLS)
            function = {"name": "bash", "arguments": '{"depth":1,\n"command":"ls"}'}
            answer = {
                "role": "assistant",
                "content": [{"type": "text", "text": "Listing the files now.\n"}],
                "tool_calls": [{"id": "other", "type": "function", "function": function}],
            }
            user = {"role": "user", "content": [{"type": "text", "text": "List the rollouts."}]}
            messages = [SYSTEM, user, answer, {"role": "tool", "tool_call_id": "other", "content": "b.txt"}]
            second = await send(proxy, messages, tools=TOOLS)
            assert continues(second, first)
            assert second.token_mode == {"renderer": "qwen3", "render": "bridge", "continues": "c0"}

    run(body())


EDITS: dict[str, Any] = {
    "the text": {"content": "Listing nothing."},
    "the arguments": {"arguments": '{"command": "rm"}'},
    "the reasoning": {"reasoning_content": "I thought something else."},
    "the user": {"user": "Do something else."},
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_history_starts_a_branch_that_says_so(edit: str) -> None:
    async def body() -> None:
        async with token_proxy(listing_then_text) as proxy:
            first = await send(proxy, [SYSTEM, USER], tools=TOOLS)
            answer, changes = json.loads(json.dumps(first.message)), dict(EDITS[edit])
            user = {"role": "user", "content": changes.pop("user", USER["content"])}
            if "arguments" in changes:
                answer["tool_calls"][0]["function"]["arguments"] = changes.pop("arguments")
            messages = [SYSTEM, user, {**answer, **changes}, result(first.message)]
            second = await send(proxy, messages, tools=TOOLS)
            assert not continues(second, first)
            assert second.token_mode is not None
            assert (second.token_mode["render"], second.token_mode["branch"]) == ("full", True)
            third = await send(proxy, [*messages, second.message, USER], tools=TOOLS)
            assert continues(third, second)
            check_ids(proxy)

    run(body())


def test_subagents_and_a_second_continuation_find_their_own_conversation() -> None:
    async def body() -> None:
        async with token_proxy(lambda prompt, calls: f"Answer {calls}.") as proxy:
            main, helper = [SYSTEM, USER], [{"role": "system", "content": "You are a helper."}, USER]
            first, inner = await send(proxy, main), await send(proxy, helper)
            second = await send(proxy, [*main, first.message, {"role": "user", "content": "One."}])
            deeper = await send(proxy, [*helper, inner.message, {"role": "user", "content": "Two."}])
            other = await send(proxy, [*main, first.message, {"role": "user", "content": "Three."}])
            assert (continues(second, first), continues(deeper, inner), continues(other, first)) == (True,) * 3
            renders = [(call.token_mode or {}).get("render") for call in proxy.capture.calls]
            assert renders == ["first", "first", "bridge", "bridge", "bridge"]
            assert (other.token_mode or {})["branch"]
            check_ids(proxy)

    run(body())


def test_other_tools_start_a_branch() -> None:
    async def body() -> None:
        async with token_proxy(lambda prompt, calls: f"Answer {calls}.") as proxy:
            first = await send(proxy, [SYSTEM, USER], tools=TOOLS)
            second = await send(proxy, [SYSTEM, USER, first.message, USER], tools=[*TOOLS, *TOOLS])
            assert (second.token_mode or {})["branch"]
            assert (second.token_mode or {})["reason"] == "the tools are not those of the earlier calls"
            third = await send(proxy, [SYSTEM, USER, first.message, USER], tools=TOOLS)
            assert continues(third, first)

    run(body())


def test_a_replaced_history_is_recorded_as_a_branch() -> None:
    async def body() -> None:
        async with token_proxy(lambda prompt, calls: f"Answer {calls}.") as proxy:
            await send(proxy, [SYSTEM, USER])
            call = await send(proxy, [SYSTEM, {"role": "user", "content": "Summary: all went well."}])
            assert (call.token_mode or {})["branch"]
            assert "only the system prompt is known" in (call.token_mode or {})["reason"]

    run(body())


@pytest.mark.parametrize("first", ["system", "user"])
def test_another_first_message_is_recorded_as_a_branch(first: str) -> None:
    async def body() -> None:
        async with token_proxy(lambda prompt, calls: f"Answer {calls}.") as proxy:
            start = [USER] if first == "user" else [SYSTEM, USER]
            call = await send(proxy, start)
            history = [{"role": first, "content": "Another one."}, *start[1:], call.message, USER]
            edited, other = await send(proxy, history), await send(proxy, [{"role": first, "content": "New."}, USER])
            assert (edited.token_mode or {})["branch"]
            assert f"message 0 ({first}) is not the one" in (edited.token_mode or {})["reason"]
            assert (other.token_mode or {})["render"] == "first"

    run(body())


def test_a_cut_off_answer_is_stored_as_it_was_and_continued() -> None:
    async def body() -> None:
        async with token_proxy(lambda prompt, calls: "A long answer that does not end.") as proxy:
            first = await send(proxy, [SYSTEM, USER], max_tokens=5, stream=True)
            assert (first.finish_reason, len(first.completion_token_ids)) == ("length", 5)
            second = await send(proxy, [SYSTEM, USER, first.message, USER])
            assert continues(second, first)
            assert "<|im_end|>\n<|im_start|>user" in prompt_text(second)
            check_ids(proxy)

    run(body())


@pytest.mark.parametrize(("text", "stream"), [("Half an ans", False), ("", True)])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_answer_that_the_engine_cut_off_is_asked_for_again(engine: str, text: str, stream: bool) -> None:
    async def body() -> None:
        stop = "<|im_end|>" if not text else None
        answers = [Reply(text, stop, "abort"), Reply(text, stop, "error"), Reply("A whole answer.")]
        async with token_proxy(lambda prompt, calls: answers[min(calls, 2)], engine) as proxy:
            call = await send(proxy, [SYSTEM, USER], stream=stream)
            assert [each["error"] for each in call.attempts] == ["the endpoint cut the answer off"] * 2
            assert (call.message["content"], call.finish_reason) == ("A whole answer.", "stop")
            server: Any = proxy.model
            assert call.completion_token_ids == server.calls[2].sampled

    run(body())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_prompt_that_the_engine_truncated_is_an_error(
    engine: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def truncated(write: Any) -> Any:
        return lambda server, prompt, *rest: write(server, prompt[3:], *rest)

    for forms in (token_engine.WHOLE, token_engine.EVENTS):
        if engine in forms:
            monkeypatch.setitem(forms, engine, truncated(forms[engine]))

    async def body() -> None:
        async with token_proxy(lambda prompt, calls: "An answer.", engine) as proxy:
            call = await send(proxy, [SYSTEM, USER], stream=stream)
            assert call.error is not None
            assert "the endpoint" in call.error
            assert "prompt" in call.error
            assert not call.trainable

    run(body())


def test_a_stream_that_breaks_within_a_tool_call_is_asked_for_again() -> None:
    async def body() -> None:
        async with token_proxy(lambda prompt, calls: tool_call("bash", command="ls"), breaks=[4, 0]) as proxy:
            call = await send(proxy, [SYSTEM, USER], tools=TOOLS, stream=True)
            assert (call.error, len(call.attempts), call.finish_reason) == (None, 2, "tool_calls")
            server: Any = proxy.model
            assert call.completion_token_ids == server.calls[-1].sampled

    run(body())


def test_a_stream_that_breaks_after_some_text_is_an_error_that_the_agent_sees() -> None:
    async def body() -> None:
        async with token_proxy(lambda prompt, calls: "Some text and more of it.", breaks=[4]) as proxy:
            call = await send(proxy, [SYSTEM, USER], stream=True)
            assert "the connection to the endpoint broke" in str(call.error)
            assert not call.trainable
            again = await send(proxy, [SYSTEM, USER], stream=True)
            assert (again.error, again.prompt_token_ids) == (None, call.prompt_token_ids)

    run(body())


def test_another_stop_token_stays_as_it_was_sampled() -> None:
    async def body() -> None:
        async with token_proxy(lambda prompt, calls: Reply("Done.", stop="<|endoftext|>")) as proxy:
            first = await send(proxy, [SYSTEM, USER])
            second = await send(proxy, [SYSTEM, USER, first.message, USER])
            assert continues(second, first)
            assert "Done.<|endoftext|>\n<|im_start|>user" in prompt_text(second)

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_tool_call_reaches_the_agent_as_text(stream: bool) -> None:
    broken = 'Trying.\n<tool_call>\n{"name": "bash", "arguments": {"command": \n</tool_call>'

    async def body() -> None:
        async with token_proxy(lambda prompt, calls: broken if not calls else "Sorry.") as proxy:
            first = await send(proxy, [SYSTEM, USER], tools=TOOLS, stream=stream)
            assert first.message["content"] == broken
            assert (first.token_mode or {})["malformed_tool_calls"][0]["status"] == "invalid_json"
            second = await send(proxy, [SYSTEM, USER, first.message, USER], tools=TOOLS, stream=stream)
            assert continues(second, first)
            check_ids(proxy)

    run(body())


def test_an_unfinished_call_is_not_continued() -> None:
    """The agent never got that answer: its repetition has the same prompt."""

    async def body() -> None:
        async with token_proxy(lambda prompt, calls: f"Answer {calls}.") as proxy:
            first = await send(proxy, [SYSTEM, USER])
            again = await send(proxy, [SYSTEM, USER])
            assert again.prompt_token_ids == first.prompt_token_ids
            second = await send(proxy, [SYSTEM, USER, again.message, USER])
            assert continues(second, again)
            assert not continues(second, first)

    run(body())


@pytest.mark.parametrize(
    ("changes", "engine", "words"),
    [
        ({"n": 2}, "vllm", "n must be 1"),
        ({"stop": ["x"]}, "llamacpp", "stop string"),
        ({"stop": 3}, "vllm", "stop must be"),
        ({"tool_choice": "required", "tools": TOOLS}, "vllm", "constrains decoding"),
        ({"response_format": {"type": "json_object"}}, "vllm", "constrains decoding"),
        ({}, "openai", "token mode needs vLLM"),
    ],
)
def test_what_cannot_be_sampled_exactly_is_refused(changes: dict[str, Any], engine: str, words: str) -> None:
    async def body() -> None:
        async with token_proxy(listing_then_text, engine) as proxy:
            got = await proxy.chat(messages=[SYSTEM, USER], **changes)
            assert got.status == 400
            assert words in got.error["message"]

    run(body())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_stop_string_ends_the_text_and_not_the_ids(engine: str, stream: bool) -> None:
    async def body() -> None:
        async with token_proxy(lambda prompt, calls: "One, two, three.", engine) as proxy:
            first = await send(proxy, [SYSTEM, USER], stop=["three"], stream=stream)
            assert first.message["content"] == "One, two,"
            second = await send(proxy, [SYSTEM, USER, first.message, USER])
            assert continues(second, first)
            assert "three" in prompt_text(second)
            check_ids(proxy)

    run(body())


def test_tool_choice_none_leaves_the_tools_out_of_the_prompt() -> None:
    async def body() -> None:
        async with token_proxy(lambda prompt, calls: "Fine.") as proxy:
            call = await send(proxy, [SYSTEM, USER], tools=TOOLS, tool_choice="none")
            assert "# Tools" not in prompt_text(call)

    run(body())


def test_images_take_the_ordinary_path_with_a_notice() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

    async def body() -> None:
        async with token_proxy(listing_then_text) as proxy:
            call = await send(proxy, [SYSTEM, {"role": "user", "content": [image]}])
            assert (call.token_mode or {})["render"] == "engine"
            assert "message 1 has a part that is no text" in proxy.capture.log_tail()
            assert call.message["content"] == "seen"

    run(body())


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_the_chat_template_of_an_unknown_family_is_extended_exactly(engine: str) -> None:
    async def body() -> None:
        async with token_proxy(lambda prompt, calls: f"Answer {calls}, rollouts.", engine, family="default") as proxy:
            first = await send(proxy, [SYSTEM, USER], stream=True)
            second = await send(proxy, [SYSTEM, USER, first.message, USER], stream=True, max_tokens=3)
            third = await send(proxy, [SYSTEM, USER, first.message, USER, second.message, USER])
            assert (continues(second, first), continues(third, second)) == (True, True)
            user = "<|im_start|>user\nList the rollouts.<|im_end|>\n"
            assert prompt_text(second).endswith(f"Answer 0, rollouts.<|im_end|>\n{user}<|im_start|>assistant\n")
            check_ids(proxy)

    run(body())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_engines_own_tokenizer_serves(engine: str) -> None:
    async def body() -> None:
        async with token_proxy(listing_then_text, engine, tokenizer="engine") as proxy:
            first = await send(proxy, [SYSTEM, USER], tools=TOOLS, stream=True)
            second = await send(proxy, [SYSTEM, USER, first.message, result(first.message)], tools=TOOLS)
            assert continues(second, first)
            assert second.message["content"] == "Seen, ünïcode 🙂 and all."
            check_ids(proxy)

    run(body())


def test_a_missing_tokenizer_is_an_error_that_the_agent_sees() -> None:
    async def body() -> None:
        async with token_proxy(listing_then_text, tokenizer="/nowhere") as proxy:
            got = await proxy.chat(messages=[SYSTEM, USER])
            assert got.status == 400
            assert "there is no tokenizer '/nowhere' on this machine" in got.error["message"]

    run(body())
