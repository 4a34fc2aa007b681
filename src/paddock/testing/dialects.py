"""Conformance suite for a proxy, in each dialect.

The proxy forwards to a `ReplayServer` that plays `SCRIPT`, and has a budget of `CALLS` calls:

    async with ReplayServer(SCRIPT) as server:
        ...  # start a proxy at `url` that forwards to `server.url` and has the API key `key`
        results = await check_dialect("anthropic", url, key)

The last check uses up the budget.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import aiohttp

from paddock.protocol.sse import DONE, EventReader
from paddock.testing.checks import Skipped, Suite, require
from paddock.testing.dialect_clients import CLIENTS

if TYPE_CHECKING:
    from paddock.testing.checks import Announce, Result
    from paddock.testing.dialect_clients import ClientReply, ClientRequest, DialectClient, Entries

CHECK_SECONDS = 30.0
CALLS = 30
IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
LONG = "word " * 4000
SCRIPT: dict[str, Any] = {
    "model": "replay",
    "max_context": 3000,
    "tasks": [
        {"when": "think", "turns": [{"thinking": "Let me see.", "text": "I see."}, {"text": "Again."}]},
        {
            "when": "one tool",
            "turns": [{"text": "Looking.", "tool": "bash", "arguments": {"command": "ls 'ä'"}}, {"text": "Seen."}],
        },
        {
            "when": "many tools",
            "turns": [
                {
                    "thinking": "All at once.",
                    "tools": [{"tool": "bash", "arguments": {"command": each}} for each in ("ls", "pwd", "id")],
                },
                {"text": "All seen."},
            ],
        },
        {"when": "", "turns": [{"text": "Hello there, ünïcode."}]},
    ],
    "faults": [{"when": "refuse this", "status": 422, "message": "I take no such thing", "times": 99}],
}


class DialectSubject:
    """A proxy under test, and a client of one dialect."""

    def __init__(self, client: DialectClient, url: str, key: str, session: aiohttp.ClientSession) -> None:
        self.client = client
        self._url = url.rstrip("/")
        self._key = key
        self._session = session

    def request(self, prompt: str, *, stream: bool = False) -> ClientRequest:
        return self.client.request(self.client.user_turn(prompt), stream=stream)

    async def post(self, request: ClientRequest, *, key: str | None = None) -> tuple[int, str]:
        headers = self.client.auth_headers(self._key if key is None else key)
        async with self._session.post(self._url + request.path, json=request.body, headers=headers) as response:
            return response.status, await response.text()

    async def get(self, url: str) -> tuple[int, str]:
        async with self._session.get(url, headers=self.client.auth_headers(self._key)) as response:
            return response.status, await response.text()

    async def models(self) -> list[str]:
        status, answer = await self.get(self.client.models_url(self._url))
        require(status == 200, f"the list of models has status {status}")
        return self.client.read_models(json.loads(answer))

    async def send(
        self, conversation: Entries, *, stream: bool = False, tools: bool = True
    ) -> tuple[ClientReply, dict[str, Any]]:
        """The reply, and the document that holds it."""
        status, answer = await self.post(self.client.request(conversation, stream=stream, tools=tools))
        require(status == 200, f"status {status}: {answer[:200]}")
        document = self.client.assemble(events_of(answer)) if stream else json.loads(answer)
        return self.client.read_reply(document), document

    async def send_refused(self, request: ClientRequest, *, key: str | None = None) -> tuple[int, dict[str, Any]]:
        status, answer = await self.post(request, key=key)
        require(400 <= status < 500, f"status {status}: {answer[:200]}")
        document = json.loads(answer)
        self.client.read_error(document)
        return status, document


async def check_dialect(dialect: str, url: str, key: str, *, announce: Announce | None = None) -> list[Result]:
    """Check the proxy at `url` (without a version) in one dialect."""
    async with aiohttp.ClientSession() as session:
        subject = DialectSubject(CLIENTS[dialect], url, key, session)
        return await DIALECT.run(subject, timeout=CHECK_SECONDS, announce=announce)


DIALECT: Suite[DialectSubject] = Suite()
check = DIALECT.check


@check("answer a plain question with text, a reason to stop and the number of tokens")
async def text_comes_back(subject: DialectSubject) -> None:
    reply, _ = await subject.send(subject.client.user_turn("hello"))
    require(reply.text == "Hello there, ünïcode.", f"the text is {reply.text!r}")
    require(reply.reason == "stop", f"the reason to stop is {reply.reason!r}")
    require(reply.prompt_tokens > 0 and reply.completion_tokens > 0, "the tokens are not counted")
    require(not reply.calls and not reply.thinking, "there is more than text")


@check("make documents and streams from the same pieces")
async def a_stream_equals_a_document(subject: DialectSubject) -> None:
    for prompt in ("hello", "think", "one tool", "many tools"):
        whole, _ = await subject.send(subject.client.user_turn(prompt))
        streamed, _ = await subject.send(subject.client.user_turn(prompt), stream=True)
        require(whole == streamed, f"{prompt}: {whole} is streamed as {streamed}")


@check("return reasoning, and accept it back")
async def reasoning_is_returned_and_accepted(subject: DialectSubject) -> None:
    conversation = subject.client.user_turn("think")
    reply, document = await subject.send(conversation)
    require((reply.thinking, reply.text) == ("Let me see.", "I see."), f"the reply is {reply}")
    later, _ = await subject.send(
        conversation + subject.client.reply_turn(document) + subject.client.user_turn("and now?")
    )
    require(later.text == "Again.", f"the next answer is {later.text!r}")


@check("translate a call, its id and its result")
async def a_tool_call_works(subject: DialectSubject) -> None:
    for stream in (False, True):
        conversation = subject.client.user_turn("one tool")
        reply, document = await subject.send(conversation, stream=stream)
        require(reply.text == "Looking." and reply.reason == "calls", f"the reply is {reply}")
        require([call.arguments for call in reply.calls] == [{"command": "ls 'ä'"}], f"the calls are {reply.calls}")
        conversation += subject.client.reply_turn(document) + subject.client.result_turn(reply.calls, ["a.txt"])
        later, _ = await subject.send(conversation, stream=stream)
        require((later.text, later.reason) == ("Seen.", "stop"), f"after the result comes {later}")


@check("keep parallel calls apart and in order")
async def parallel_tool_calls_work(subject: DialectSubject) -> None:
    for stream in (False, True):
        conversation = subject.client.user_turn("many tools")
        reply, document = await subject.send(conversation, stream=stream)
        commands = [call.arguments["command"] for call in reply.calls]
        require(commands == ["ls", "pwd", "id"], f"the commands are {commands}")
        require(len({call.id for call in reply.calls}) == 3, "the calls have no ids of their own")
        conversation += subject.client.reply_turn(document) + subject.client.result_turn(reply.calls, ["1", "2", "3"])
        later, _ = await subject.send(conversation, stream=stream)
        require(later.text == "All seen.", f"after the results comes {later.text!r}")


@check("accept images of the user and of tools")
async def images_are_accepted(subject: DialectSubject) -> None:
    reply, _ = await subject.send(subject.client.user_turn("what is this?", IMAGE))
    require(reply.text != "", "there is no answer")
    conversation = subject.client.user_turn("one tool")
    reply, document = await subject.send(conversation)
    conversation += subject.client.reply_turn(document) + subject.client.result_turn(
        reply.calls, ["a picture"], IMAGE
    )
    later, _ = await subject.send(conversation)
    require(later.text == "Seen.", f"after the picture comes {later.text!r}")


@check("count the tokens of the prompt that the same request makes")
async def tokens_are_counted(subject: DialectSubject) -> None:
    request = subject.request("hello")
    try:
        count_request = subject.client.count_request(request)
    except NotImplementedError:
        raise Skipped("this dialect has no way to ask for a number of tokens") from None
    status, answer = await subject.post(count_request)
    require(status == 200, f"status {status}: {answer[:200]}")
    count = subject.client.read_count(json.loads(answer))
    reply, _ = await subject.send(subject.client.user_turn("hello"))
    require(count == reply.prompt_tokens, f"{count} are counted, and {reply.prompt_tokens} used")


@check("list the model in the form of the dialect")
async def the_model_is_listed(subject: DialectSubject) -> None:
    models = await subject.models()
    require(models == [SCRIPT["model"]], f"the models are {models}")


@check("refuse what the endpoint refuses, in the form of the dialect")
async def errors_have_the_form_of_the_dialect(subject: DialectSubject) -> None:
    for stream in (False, True):
        request = subject.request("refuse this", stream=stream)
        status, document = await subject.send_refused(request)
        require(status == 422, f"status {status}")
        message = subject.client.read_error(document)
        require("no such thing" in message, f"the message is {message!r}")


@check("report an overflow with the text or code that programs of this dialect look for")
async def a_context_overflow_is_recognized(subject: DialectSubject) -> None:
    _, document = await subject.send_refused(subject.request(LONG))
    require(subject.client.is_overflow(document), f"the error is {document}")


@check("refuse a call that forces a tool")
async def forced_tool_calls_are_refused(subject: DialectSubject) -> None:
    request = subject.request("one tool")
    subject.client.force_tool(request)
    status, _ = await subject.send_refused(request)
    require(status == 400, f"status {status}")


@check("refuse a body that is no request, in the form of the dialect")
async def an_invalid_body_is_refused(subject: DialectSubject) -> None:
    request = subject.client.request([])
    for bad in ({}, {"messages": 1, "input": 1, "contents": 1}):
        request.body.clear()
        request.body.update(bad)
        status, _ = await subject.send_refused(request)
        require(status == 400, f"status {status}")


@check("refuse requests without the key")
async def a_wrong_key_is_refused(subject: DialectSubject) -> None:
    request = subject.request("hello")
    for key in ("", "wrong"):
        status, _ = await subject.send_refused(request, key=key)
        require(status == 401, f"status {status}")


@check("end the program's loop with a plain text when the budget is used up")
async def an_exhausted_budget_stops_the_program(subject: DialectSubject) -> None:
    for number in range(CALLS + 1):
        reply, _ = await subject.send(subject.client.user_turn(f"one tool, try {number}"))
        if not reply.calls:
            break
    else:
        raise Skipped(f"the proxy has no budget of {CALLS} calls or fewer")
    for stream in (False, True):
        reply, _ = await subject.send(subject.client.user_turn("one tool"), stream=stream)
        require("budget" in reply.text.lower(), f"the last word is {reply.text!r}")
        require(reply.reason == "stop", f"the reason to stop is {reply.reason!r}")


def events_of(stream: str) -> list[tuple[str, dict[str, Any]]]:
    """The names and the data of the events, without comments and the end marker."""
    return [
        (event.name, json.loads(event.data))
        for event in EventReader().feed(stream.encode())
        if event.data != DONE and event.name not in ("ping", "keepalive")
    ]
