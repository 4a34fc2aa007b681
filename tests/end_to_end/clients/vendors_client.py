"""The official clients of OpenAI, Anthropic and Google, each in its own dialect.

Takes the address of a proxy, its key, and the address of a proxy with the same key whose budget is spent.
"""

import json
import sys
from typing import Any

import anthropic
import openai
from anthropic import beta_tool
from google import genai
from google.genai import errors, types
from report import report

URL, KEY, SPENT_URL = sys.argv[1:4]
LONG = "word " * 4000
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def heard(text: str | None, thinking: str, calls: list[Any], reason: Any, tokens: Any) -> dict[str, Any]:
    return {"text": text or "", "thinking": thinking, "calls": calls, "reason": str(reason), "counted": bool(tokens)}


# -- OpenAI, chat completions -------------------------------------------------------------------------


def openai_client(url: str = URL, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20)


CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]


def chat_say(client: openai.OpenAI, messages: list[Any], stream: bool) -> Any:
    if not stream:
        return client.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)
    request = client.chat.completions.stream(
        model="m", messages=messages, tools=CHAT_TOOLS, stream_options={"include_usage": True}
    )
    with request as events:
        for _ in events:
            pass
        return events.get_final_completion()


def chat_heard(answer: Any) -> dict[str, Any]:
    choice = answer.choices[0]
    calls = [json.loads(call.function.arguments)["command"] for call in choice.message.tool_calls or ()]
    thinking = (choice.message.model_extra or {}).get("reasoning_content") or ""
    return heard(choice.message.content, thinking, calls, choice.finish_reason, answer.usage.completion_tokens)


def chat() -> Any:
    client, reply = openai_client(), {}
    for stream in (False, True):
        messages: list[Any] = [{"role": "user", "content": "many tools"}]
        first = chat_say(client, messages, stream)
        message = first.choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "seen"})
        reply[f"stream {stream}"] = [chat_heard(first), chat_heard(chat_say(client, messages, stream))]
    reply["models"] = [model.id for model in client.models.list()]
    return reply


# -- OpenAI, responses --------------------------------------------------------------------------------


RESPONSES_TOOLS: Any = [
    {"type": "function", "name": "bash", "parameters": PARAMETERS, "strict": False},
    {"type": "web_search"},
]


def responses_say(client: openai.OpenAI, entries: Any, stream: bool, **more: Any) -> Any:
    if not stream:
        return client.responses.create(model="m", input=entries, tools=RESPONSES_TOOLS, **more)
    with client.responses.stream(model="m", input=entries, tools=RESPONSES_TOOLS, **more) as events:
        for _ in events:
            pass
        return events.get_final_response()


def responses_heard(answer: Any) -> dict[str, Any]:
    calls = [json.loads(item.arguments)["command"] for item in answer.output if item.type == "function_call"]
    thinking = "".join(part.text for item in answer.output if item.type == "reasoning" for part in item.content or ())
    return heard(answer.output_text, thinking, calls, answer.status, answer.usage.output_tokens)


def outputs(answer: Any) -> list[Any]:
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}", "detail": "auto"}
    output = [{"type": "input_text", "text": "seen"}, picture]
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": output}
        for item in answer.output
        if item.type == "function_call"
    ]


def responses() -> Any:
    client, reply = openai_client(), {}
    for stream in (False, True):
        values: list[Any] = [{"role": "user", "content": "many tools"}]
        first = responses_say(client, values, stream)
        values += [item.model_dump(exclude_none=True) for item in first.output]
        second = responses_say(client, values + outputs(first), stream)
        remembered = responses_say(client, outputs(first), stream, previous_response_id=first.id)
        reply[f"stream {stream}"] = [responses_heard(first), responses_heard(second)]
        reply[f"remembered, stream {stream}"] = responses_heard(remembered)
    reply["retrieved"] = client.responses.retrieve(first.id).output_text == first.output_text
    counted = client.responses.input_tokens.count(model="m", input="hello", tools=RESPONSES_TOOLS)
    request = responses_say(client, "hello", False)
    reply["counted"] = counted.input_tokens == request.usage.input_tokens
    return reply


def responses_unknown() -> Any:
    try:
        responses_say(openai_client(), "hello", False, previous_response_id="resp_unknown")
    except openai.BadRequestError as error:
        return error.status_code, "resp_unknown" in error.message


# -- Anthropic ----------------------------------------------------------------------------------------


def anthropic_client(url: str = URL, key: str = KEY) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=20)


ANTHROPIC_TOOLS: Any = [
    {"name": "bash", "input_schema": PARAMETERS},
    {"type": "web_search_20250305", "name": "web_search"},
]


def anthropic_say(client: anthropic.Anthropic, messages: list[Any], stream: bool) -> Any:
    request: Any = {"model": "m", "max_tokens": 500, "messages": messages, "tools": ANTHROPIC_TOOLS}
    if not stream:
        return client.messages.create(**request)
    with client.messages.stream(**request) as events:
        for _ in events:
            pass
        return events.get_final_message()


def anthropic_heard(answer: Any) -> dict[str, Any]:
    text = "".join(block.text for block in answer.content if block.type == "text")
    thinking = "".join(block.thinking for block in answer.content if block.type == "thinking")
    calls = [block.input["command"] for block in answer.content if block.type == "tool_use"]
    return heard(text, thinking, calls, answer.stop_reason, answer.usage.input_tokens and answer.usage.output_tokens)


def anthropic_messages() -> Any:
    client, reply = anthropic_client(), {}
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}
    for stream in (False, True):
        messages: list[Any] = [{"role": "user", "content": "many tools"}]
        first = anthropic_say(client, messages, stream)
        messages.append({"role": "assistant", "content": first.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "seen"}, picture]}
            for block in first.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
        reply[f"stream {stream}"] = [anthropic_heard(first), anthropic_heard(anthropic_say(client, messages, stream))]
    reply["models"] = [model.id for model in client.models.list()]
    hello: Any = [{"role": "user", "content": "hello"}]
    counted = client.messages.count_tokens(model="m", messages=hello, tools=ANTHROPIC_TOOLS)
    reply["counted"] = counted.input_tokens == anthropic_say(client, hello, False).usage.input_tokens
    return reply


def anthropic_runner() -> Any:
    """The client's own loop with tools."""
    commands: list[str] = []

    @beta_tool
    def bash(command: str) -> str:
        """Run a command.

        Args:
            command: what to run
        """
        commands.append(command)
        return "a.txt"

    hello: Any = [{"role": "user", "content": "one tool"}]
    runner = anthropic_client().beta.messages.tool_runner(model="m", max_tokens=500, tools=[bash], messages=hello)
    last = runner.until_done()
    return commands, last.content[0].text


# -- Google -------------------------------------------------------------------------------------------


def google_client(url: str = URL, key: str = KEY) -> genai.Client:
    return genai.Client(api_key=key, vertexai=False, http_options=types.HttpOptions(base_url=url, timeout=20_000))


DECLARED = types.FunctionDeclaration(
    name="bash", parameters=types.Schema(type="OBJECT", properties={"command": types.Schema(type="STRING")})
)
GOOGLE_CONFIG = types.GenerateContentConfig(
    tools=[types.Tool(function_declarations=[DECLARED]), types.Tool(google_search=types.GoogleSearch())],
    automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
)


def google_say(client: genai.Client, contents: Any, stream: bool) -> tuple[dict[str, Any], list[Any]]:
    request: Any = {"model": "m", "contents": contents, "config": GOOGLE_CONFIG}
    if stream:
        answers = list(client.models.generate_content_stream(**request))
    else:
        answers = [client.models.generate_content(**request)]
    parts = [part for answer in answers for part in answer.candidates[0].content.parts]
    text = "".join(part.text or "" for part in parts if not part.thought)
    thinking = "".join(part.text or "" for part in parts if part.thought)
    calls = [part.function_call.args["command"] for part in parts if part.function_call]
    last = answers[-1]
    reason = last.candidates[0].finish_reason.value
    return heard(text, thinking, calls, reason, last.usage_metadata.candidates_token_count), parts


def google_generate() -> Any:
    client, reply = google_client(), {}
    picture = types.Part.from_bytes(data=b"\x89PNG", mime_type="image/png")
    for stream in (False, True):
        contents: list[Any] = [types.Content(role="user", parts=[types.Part(text="many tools")])]
        first, parts = google_say(client, contents, stream)
        contents.append(types.Content(role="model", parts=[part for part in parts if not part.thought]))
        results = [
            types.Part.from_function_response(name=part.function_call.name, response={"output": "seen"})
            for part in parts
            if part.function_call
        ]
        contents.append(types.Content(role="user", parts=[*results, picture]))
        reply[f"stream {stream}"] = [first, google_say(client, contents, stream)[0]]
    reply["models"] = [model.name for model in client.models.list()]
    reply["counted"] = client.models.count_tokens(model="m", contents="hello").total_tokens > 0
    return reply


def google_chat() -> Any:
    """The client's own loop with tools."""
    commands: list[str] = []

    def bash(command: str) -> str:
        """Run a command."""
        commands.append(command)
        return "a.txt"

    client = google_client()
    talk = client.chats.create(model="m", config=types.GenerateContentConfig(tools=[bash]))
    return commands, talk.send_message("one tool").text


# -- errors and budgets -------------------------------------------------------------------------------


def says(client_of: str, words: str, url: str = URL, key: str = KEY) -> Any:
    if client_of == "chat":
        return chat_say(openai_client(url, key), [{"role": "user", "content": words}], False)
    if client_of == "responses":
        return responses_say(openai_client(url, key), words, False)
    if client_of == "anthropic":
        return anthropic_say(anthropic_client(url, key), [{"role": "user", "content": words}], False)
    return google_say(google_client(url, key), words, False)


def refused(client_of: str, words: str, key: str = KEY) -> Any:
    try:
        says(client_of, words, key=key)
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        return type(error).__name__, error.status_code, error.message
    except errors.APIError as error:
        return type(error).__name__, error.code, error.message


NAMES = ("chat", "responses", "anthropic", "google")


def overflow() -> Any:
    return {name: refused(name, LONG) for name in NAMES}


def refusal() -> Any:
    return {name: refused(name, "refuse this") for name in NAMES}


def wrong_key() -> Any:
    return {name: refused(name, "hello", "wrong") for name in NAMES}


def google_heard(answer: Any) -> Any:
    return answer[0]


def budget() -> Any:
    hear = dict(zip(NAMES, (chat_heard, responses_heard, anthropic_heard, google_heard), strict=True))
    return {name: hear[name](says(name, "one tool", SPENT_URL)) for name in NAMES}


sys.argv[1:] = []
report(
    chat, responses, responses_unknown, anthropic_messages, anthropic_runner, google_generate, google_chat,
    overflow, refusal, wrong_key, budget,
)  # fmt: skip
