"""What a proxy must get right in each dialect, check by check.

The proxy stands before a `ReplayServer` that plays `SCRIPT`, with a budget of `CALLS` calls:

    async with ReplayServer(SCRIPT) as server:
        ...  # a proxy before server.url, at url, that wants key
        results = await check_dialect("anthropic", url, key)

The last check spends what is left of the budget.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import aiohttp

from paddock.testing.checks import Skipped, Suite, Wrong
from paddock.testing.speakers import SPEAKERS

if TYPE_CHECKING:
    from paddock.testing.checks import Announce, Result
    from paddock.testing.speakers import Ask, Entries, Heard, Speaker

CHECK_TIMEOUT = 30.0
CALLS = 30
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
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


class Subject:
    """A proxy, and somebody who speaks to it in one dialect."""

    def __init__(self, speaker: Speaker, url: str, key: str, session: aiohttp.ClientSession) -> None:
        self.speaker = speaker
        self._url = url.rstrip("/")
        self._key = key
        self._session = session

    async def post(self, ask: Ask, *, key: str | None = None) -> tuple[int, str]:
        headers = self.speaker.key(self._key if key is None else key)
        async with self._session.post(self._url + ask.path, json=ask.body, headers=headers) as response:
            return response.status, await response.text()

    async def get(self, url: str) -> tuple[int, str]:
        async with self._session.get(url, headers=self.speaker.key(self._key)) as response:
            return response.status, await response.text()

    async def models(self) -> list[str]:
        status, answer = await self.get(self.speaker.models(self._url))
        expect(status == 200, f"the list of models has status {status}")
        return self.speaker.listed(json.loads(answer))

    async def say(
        self, conversation: Entries, *, stream: bool = False, tools: bool = True
    ) -> tuple[Heard, dict[str, Any]]:
        """The answer, and the document it stood in."""
        status, answer = await self.post(self.speaker.ask(conversation, stream=stream, tools=tools))
        expect(status == 200, f"status {status}: {answer[:200]}")
        document = self.speaker.gather(events_of(answer)) if stream else json.loads(answer)
        return self.speaker.hear(document), document

    async def refused(self, ask: Ask, *, key: str | None = None) -> tuple[int, dict[str, Any]]:
        status, answer = await self.post(ask, key=key)
        expect(400 <= status < 500, f"status {status}: {answer[:200]}")
        document = json.loads(answer)
        self.speaker.error(document)
        return status, document


async def check_dialect(dialect: str, url: str, key: str, *, announce: Announce | None = None) -> list[Result]:
    """Examine the proxy at `url` (without a version) in one dialect."""
    async with aiohttp.ClientSession() as session:
        subject = Subject(SPEAKERS[dialect], url, key, session)
        return await DIALECT.run(subject, timeout=CHECK_TIMEOUT, announce=announce)


DIALECT: Suite[Subject] = Suite()
check = DIALECT.check


@check("answer a plain question with text, a reason to stop and the number of tokens")
async def text_comes_back(subject: Subject) -> None:
    heard, _ = await subject.say(subject.speaker.user("hello"))
    expect(heard.text == "Hello there, ünïcode.", f"the text is {heard.text!r}")
    expect(heard.reason == "stop", f"the reason to stop is {heard.reason!r}")
    expect(heard.prompt_tokens > 0 and heard.completion_tokens > 0, "the tokens are not counted")
    expect(not heard.calls and not heard.thinking, "there is more than text")


@check("make documents and streams from the same pieces")
async def a_stream_says_the_same_as_a_document(subject: Subject) -> None:
    for words in ("hello", "think", "one tool", "many tools"):
        whole, _ = await subject.say(subject.speaker.user(words))
        streamed, _ = await subject.say(subject.speaker.user(words), stream=True)
        expect(whole == streamed, f"{words}: {whole} is streamed as {streamed}")


@check("give thoughts back where the dialect has a place for them")
async def thoughts_are_told_and_taken_back(subject: Subject) -> None:
    conversation = subject.speaker.user("think")
    heard, document = await subject.say(conversation)
    expect((heard.thinking, heard.text) == ("Let me see.", "I see."), f"heard {heard}")
    later, _ = await subject.say(conversation + subject.speaker.said(document) + subject.speaker.user("and now?"))
    expect(later.text == "Again.", f"the next answer is {later.text!r}")


@check("translate a call, its id and its result")
async def a_tool_goes_round(subject: Subject) -> None:
    for stream in (False, True):
        conversation = subject.speaker.user("one tool")
        heard, document = await subject.say(conversation, stream=stream)
        expect(heard.text == "Looking." and heard.reason == "calls", f"heard {heard}")
        expect([call.arguments for call in heard.calls] == [{"command": "ls 'ä'"}], f"heard {heard.calls}")
        conversation += subject.speaker.said(document) + subject.speaker.results(heard.calls, ["a.txt"])
        later, _ = await subject.say(conversation, stream=stream)
        expect((later.text, later.reason) == ("Seen.", "stop"), f"after the result comes {later}")


@check("keep parallel calls apart and in order")
async def several_tools_go_round(subject: Subject) -> None:
    for stream in (False, True):
        conversation = subject.speaker.user("many tools")
        heard, document = await subject.say(conversation, stream=stream)
        commands = [call.arguments["command"] for call in heard.calls]
        expect(commands == ["ls", "pwd", "id"], f"the commands are {commands}")
        expect(len({call.id for call in heard.calls}) == 3, "the calls have no ids of their own")
        conversation += subject.speaker.said(document) + subject.speaker.results(heard.calls, ["1", "2", "3"])
        later, _ = await subject.say(conversation, stream=stream)
        expect(later.text == "All seen.", f"after the results comes {later.text!r}")


@check("take pictures of the user and of tools")
async def pictures_are_taken(subject: Subject) -> None:
    heard, _ = await subject.say(subject.speaker.user("what is this?", PICTURE))
    expect(heard.text != "", "there is no answer")
    conversation = subject.speaker.user("one tool")
    heard, document = await subject.say(conversation)
    conversation += subject.speaker.said(document) + subject.speaker.results(heard.calls, ["a picture"], PICTURE)
    later, _ = await subject.say(conversation)
    expect(later.text == "Seen.", f"after the picture comes {later.text!r}")


@check("count the tokens of the prompt that the same request makes")
async def tokens_are_counted(subject: Subject) -> None:
    ask = subject.speaker.ask(subject.speaker.user("hello"))
    try:
        question = subject.speaker.count(ask)
    except NotImplementedError:
        raise Skipped("this dialect has no way to ask for a number of tokens") from None
    status, answer = await subject.post(question)
    expect(status == 200, f"status {status}: {answer[:200]}")
    told = subject.speaker.counted(json.loads(answer))
    heard, _ = await subject.say(subject.speaker.user("hello"))
    expect(told == heard.prompt_tokens, f"{told} are told, and {heard.prompt_tokens} used")


@check("list the one model in the shape of the dialect")
async def the_model_is_listed(subject: Subject) -> None:
    found = await subject.models()
    expect(found == [SCRIPT["model"]], f"the models are {found}")


@check("refuse what the endpoint refuses, in the shape of the dialect")
async def refusals_have_the_right_shape(subject: Subject) -> None:
    for stream in (False, True):
        ask = subject.speaker.ask(subject.speaker.user("refuse this"), stream=stream)
        status, document = await subject.refused(ask)
        expect(status == 422, f"status {status}")
        told = subject.speaker.error(document)
        expect("no such thing" in told, f"the refusal says {told!r}")


@check("tell an overflow in the words that programs of this dialect look for")
async def an_overflow_is_understood(subject: Subject) -> None:
    _, document = await subject.refused(subject.speaker.ask(subject.speaker.user(LONG)))
    expect(subject.speaker.is_overflow(document), f"told is {document}")


@check("refuse a call that forces what the model may say")
async def force_is_refused(subject: Subject) -> None:
    ask = subject.speaker.ask(subject.speaker.user("one tool"))
    subject.speaker.force(ask)
    status, _ = await subject.refused(ask)
    expect(status == 400, f"status {status}")


@check("refuse a body that is no request, in the shape of the dialect")
async def a_bad_body_is_refused(subject: Subject) -> None:
    ask = subject.speaker.ask([])
    for bad in ({}, {"messages": 1, "input": 1, "contents": 1}):
        ask.body.clear()
        ask.body.update(bad)
        status, _ = await subject.refused(ask)
        expect(status == 400, f"status {status}")


@check("let nobody in who does not show the key")
async def a_wrong_key_is_refused(subject: Subject) -> None:
    ask = subject.speaker.ask(subject.speaker.user("hello"))
    for key in ("", "wrong"):
        status, _ = await subject.refused(ask, key=key)
        expect(status == 401, f"status {status}")


@check("end the program's loop with a plain answer when the budget is spent")
async def a_spent_budget_stops_the_program(subject: Subject) -> None:
    for number in range(CALLS + 1):
        heard, _ = await subject.say(subject.speaker.user(f"one tool, try {number}"))
        if not heard.calls:
            break
    else:
        raise Skipped(f"the proxy has no budget of {CALLS} calls or fewer")
    for stream in (False, True):
        heard, _ = await subject.say(subject.speaker.user("one tool"), stream=stream)
        expect("budget" in heard.text.lower(), f"the last word is {heard.text!r}")
        expect(heard.reason == "stop", f"the reason to stop is {heard.reason!r}")


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)


def events_of(stream: str) -> list[tuple[str, dict[str, Any]]]:
    """The names and the data of the events, comments and the mark of the end left out."""
    found = []
    for block in stream.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        name = next((line[7:] for line in lines if line.startswith("event: ")), "")
        data = "\n".join(line[6:] for line in lines if line.startswith("data: "))
        if data and data != "[DONE]" and name not in ("ping", "keepalive"):
            found.append((name, json.loads(data)))
    return found
