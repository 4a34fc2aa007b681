"""Families of models, each with its own form of reasoning and tool calls: what the agent gets of sampled ids, and
that the next prompt continues them."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from capture.harness import run
from capture.token_engine import SPECIAL, Reply
from capture.tokens.harness import SYSTEM, check_ids, continues, prompt_text, send, token_proxy
from paddock.capture.trace import Call

USER = {"role": "user", "content": "List the rollouts."}
STRING: dict[str, Any] = {"type": "string"}
PARAMETERS = {"command": STRING, "deep": {"type": "object"}, "quick": {"type": "boolean"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Do it.", "parameters": {"properties": each}}}
    for name, each in (("bash", PARAMETERS), ("read", {"path": {"type": ["string", "null"]}}))
]
BASH, READ = '{"command": "ls \'ä\'", "deep": {"a": [1]}}', '{"path": "/a b"}'
CALLS = [("bash", {"command": "ls 'ä'", "deep": {"a": [1]}}), ("read", {"path": "/a b"})]
THOUGHT, TEXT = "I should look 🙂 first.", "Listing them, ünïcode 🙂."
GLM_CALLS = (
    "<tool_call>bash<arg_key>command</arg_key><arg_value>ls 'ä'</arg_value><arg_key>deep</arg_key>"
    '<arg_value>{"a": [1]}</arg_value></tool_call>'
    "<tool_call>read<arg_key>path</arg_key><arg_value>/a b</arg_value></tool_call>"
)
XML_CALLS = (
    "\n<tool_call>\n<function=bash>\n<parameter=command>\nls 'ä'\n</parameter>\n<parameter=deep>\n"
    '{"a": [1]}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=read>\n<parameter=path>\n'
    "/a b\n</parameter>\n</function>\n</tool_call>"
)
MINIMAX_CALLS = (
    '\n<minimax:tool_call>\n<invoke name="bash">\n<parameter name="command">ls \'ä\'</parameter>\n'
    '<parameter name="deep">{"a": [1]}</parameter>\n</invoke>\n<invoke name="read">\n'
    '<parameter name="path">/a b</parameter>\n</invoke>\n</minimax:tool_call>'
)
DEEPSEEK_MARKERS = "calls▁begin calls▁end call▁begin call▁end sep outputs▁begin outputs▁end output▁begin output▁end"


@dataclass(frozen=True)
class Family:
    markers: str
    reply: str
    """The first answer, as the model samples it after the prompt."""
    stop: str
    thought: str | None = THOUGHT
    calls: int = 2
    marks_calls: bool = True
    """A token begins each call. Without one, a call that is cut off is text."""
    extends_cut_off_calls: bool = True


FAMILIES = {
    "qwen3": Family(
        " ".join(SPECIAL),
        f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n"
        f'<tool_call>\n{{"name": "bash", "arguments": {BASH}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "read", "arguments": {READ}}}\n</tool_call>',
        "<|im_end|>",
    ),
    "qwen3.5": Family(
        f"{' '.join(SPECIAL)} <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>",
        f"{THOUGHT}\n</think>\n\n{TEXT}\n{XML_CALLS}",
        "<|im_end|>",
    ),
    "nemotron-3": Family(" ".join(SPECIAL), f"{THOUGHT}\n</think>\n{TEXT}{XML_CALLS}\n", "<|im_end|>"),
    "glm-5": Family(
        "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call>"
        " </tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <tool_response> </tool_response>",
        f"{THOUGHT}</think>{TEXT}{GLM_CALLS}",
        "<|observation|>",
    ),
    "deepseek-v3": Family(
        " ".join(
            f"<｜{name}｜>"
            for name in (
                *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant"),
                *(f"tool▁{name}" for name in DEEPSEEK_MARKERS.split()),
            )
        ),
        f"{TEXT}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{BASH}\n```"
        f"<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read\n```json\n{READ}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "<｜end▁of▁sentence｜>",
        thought=None,
    ),
    "kimi-k2.5": Family(
        "[EOS] <|endoftext|> <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_call_begin|>"
        " <|tool_call_argument_begin|> <|tool_call_end|> <|tool_calls_section_begin|> <|tool_calls_section_end|>"
        " <|media_begin|> <|media_content|> <|media_end|> <|media_pad|>",
        f"{THOUGHT}</think>{TEXT}<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0"
        f"<|tool_call_argument_begin|>{BASH}<|tool_call_end|><|tool_call_begin|>functions.read:1"
        f"<|tool_call_argument_begin|>{READ}<|tool_call_end|><|tool_calls_section_end|>",
        "<|im_end|>",
    ),
    "minimax-m2": Family(
        "]~!b[ ]~b] [e~[ <think> </think> <minimax:tool_call> </minimax:tool_call>",
        f"{THOUGHT}\n</think>\n\n{TEXT}{MINIMAX_CALLS}",
        "[e~[",
    ),
    "gemma4": Family(
        "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> <tool_call|>"
        ' <|tool_response> <tool_response|> <|"|> <|image> <|image|> <image|>',
        f"{TEXT}<|tool_call>call:bash{{command:<|\"|>ls 'ä'<|\"|>,deep:{{a:[1]}}}}<tool_call|>"
        '<|tool_call>call:read{path:<|"|>/a b<|"|>}<tool_call|>',
        "<|tool_response>",
        thought=None,
        extends_cut_off_calls=False,
    ),
    "llama-3": Family(
        "<|begin_of_text|> <|end_of_text|> <|eot_id|> <|eom_id|> <|start_header_id|> <|end_header_id|>"
        " <|python_tag|>",
        f'{{"name": "bash", "parameters": {BASH}}}',
        "<|eot_id|>",
        thought=None,
        calls=1,
        marks_calls=False,
    ),
    "inkling": Family(
        "<|message_user|> <|message_model|> <|message_system|> <|message_tool|> <|content_text|> <|content_thinking|>"
        " <|content_image|> <|content_audio_input|> <|audio_end|> <|content_invoke_tool_json|> <|content_xml|>"
        " <|content_invoke_tool_text|> <|content_model_end_sampling|> <|end_message|> <|endoftext|>"
        " <|unused_200053|> <|unused_200054|>",
        f"<|content_thinking|>{THOUGHT}<|end_message|><|message_model|><|content_text|>{TEXT}<|end_message|>"
        f'<|message_model|>bash<|content_invoke_tool_json|>{{"name": "bash", "args": {BASH}}}<|end_message|>'
        f'<|message_model|>read<|content_invoke_tool_json|>{{"name": "read", "args": {READ}}}<|end_message|>',
        "<|content_model_end_sampling|>",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_agent_gets_the_calls_of_a_family_and_continues_its_ids(name: str, stream: bool) -> None:
    family = FAMILIES[name]

    async def body() -> None:
        special = tuple(family.markers.split())
        cut_off = family.reply[: family.reply.rindex("ls 'ä'" if family.calls == 1 else "/a b")]
        replies = [Reply(family.reply, family.stop), Reply(cut_off, None, "length"), Reply("Ok", family.stop)]
        async with token_proxy(lambda _, calls: replies[calls], family=name, special=special) as proxy:
            first = await send(proxy, [SYSTEM, USER], tools=TOOLS, stream=stream)
            check_answer(first.message, family)
            assert first.finish_reason == "tool_calls"
            assert "malformed_tool_calls" not in (first.token_mode or {})
            results = [result(call, number) for number, call in enumerate(first.message["tool_calls"])]
            messages = [SYSTEM, USER, first.message, *results]
            second = await send(proxy, messages, tools=TOOLS, stream=stream)
            assert continues(second, first)
            tail = prompt_text(second, special)[len(prompt_text(first, special)) :]
            assert all(tail.count(f"result {number}") == 1 for number in range(family.calls))
            assert (second.finish_reason, len(malformed(second))) == ("length", int(family.marks_calls))
            calls = second.message.get("tool_calls") or []
            results = [result(call, number) for number, call in enumerate(calls)]
            messages = [*messages, second.message, *results, {"role": "user", "content": "Go on."}]
            third = await send(proxy, messages, tools=TOOLS, stream=stream)
            render = "bridge" if family.extends_cut_off_calls else "full"
            assert ((third.token_mode or {})["render"], continues(third, second)) == (render, render == "bridge")
            check_ids(proxy)

    run(body())


def test_a_value_of_another_type_reaches_the_agent_and_pythons_words_are_read() -> None:
    """As engines do it: the agent says what is wrong. Templates of this family write Python's True."""
    family, values = FAMILIES["qwen3.5"], {"command": "True", "quick": "True", "deep": "no object"}
    texts = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    reply = f"Hm.\n</think>\n\n<tool_call>\n<function=bash>\n{texts}</function>\n</tool_call>"

    async def body() -> None:
        special = tuple(family.markers.split())
        async with token_proxy(lambda *_: Reply(reply, family.stop), family="qwen3.5", special=special) as proxy:
            call = await send(proxy, [SYSTEM, USER], tools=TOOLS, stream=True)
            (tool_call,) = call.message["tool_calls"]
            assert tool_call["function"]["arguments"] == '{"command": "True", "quick": true, "deep": "no object"}'
            assert malformed(call) == []
            assert call.message["content"] is None

    run(body())


def check_answer(message: dict[str, Any], family: Family) -> None:
    text = TEXT if TEXT in family.reply else None
    assert (message.get("reasoning_content"), message["content"]) == (family.thought, text)
    functions = [call["function"] for call in message["tool_calls"]]
    assert [(each["name"], json.loads(each["arguments"])) for each in functions] == CALLS[: family.calls]


def malformed(call: Call) -> list[dict[str, str]]:
    return list((call.token_mode or {}).get("malformed_tool_calls", ()))


def result(call: dict[str, Any], number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"}
