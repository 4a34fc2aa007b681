"""The replay server over real sockets: what it answers in each format, and how it breaks on request."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from paddock.errors import ConfigError
from paddock.models.replay import ReplayServer, Script, ServedRequest
from paddock.models.replay.answer import answer
from paddock.models.replay.tokenizer import Marker, decode, logprob, prompt_ids

TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]
ASK: dict[str, Any] = {"model": "replay", "messages": [{"role": "user", "content": "write hello.py"}], "tools": TOOLS}
CAPTURE = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
WRITE = {"tool": "write", "arguments": {"path": "hello.py", "content": "print('é')"}}
SCRIPT: dict[str, Any] = {"seed": 3, "turns": [WRITE, {"thinking": "It is there.", "text": "All done."}]}


class Caller:
    """Talks to one replay server."""

    def __init__(self, server: ReplayServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    @property
    def last(self) -> ServedRequest:
        return self.server.log[-1]

    async def ask(self, **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.session.post(f"{self.server.url}/chat/completions", json={**ASK, **body}) as answer:
            return answer.status, json.loads(await answer.read())

    async def stream(self, **body: Any) -> list[dict[str, Any] | str]:
        """The events of a stream, parsed; `[DONE]` as it is."""
        async with self.session.post(f"{self.server.url}/chat/completions", json={**ASK, **STREAM, **body}) as answer:
            assert answer.status == 200
            lines = (await answer.read()).decode().split("\n\n")
        result = [line.removeprefix("data: ") for line in lines if line]
        return [one if one == "[DONE]" else json.loads(one) for one in result]


def play(script: Any, talk: Callable[[Caller], Awaitable[None]], **options: Any) -> list[ServedRequest]:
    """Serve a script for one conversation of a test."""

    async def run() -> list[ServedRequest]:
        async with ReplayServer(script, **options) as server, aiohttp.ClientSession() as session:
            await talk(Caller(server, session))
            return server.log

    return asyncio.run(asyncio.wait_for(run(), 20))


def history(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return [*ASK["messages"], *messages]


def tool_result(text: str = "ok") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_0_0", "content": text}


def joined(events: list[dict[str, Any] | str]) -> dict[str, Any]:
    """What the deltas of a stream add up to, as a client puts them together."""
    whole: dict[str, Any] = {
        "content": "",
        "reasoning_content": "",
        "calls": [],
        "ids": [],
        "logprobs": [],
        "finish": None,
    }
    for event in events:
        if isinstance(event, str) or not event.get("choices"):
            continue
        choice = event["choices"][0]
        for key in ("content", "reasoning_content"):
            whole[key] += choice["delta"].get(key) or ""
        for part in choice["delta"].get("tool_calls") or ():
            if "id" in part:
                whole["calls"].append([part["function"]["name"], ""])
            whole["calls"][part["index"]][1] += part["function"]["arguments"]
        whole["ids"] += choice.get("token_ids") or []
        whole["logprobs"] += [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content", ())]
        whole["finish"] = choice["finish_reason"] or whole["finish"]
    return whole


# -- answers --------------------------------------------------------------------------------------


def test_an_answer_has_ids_and_exact_logprobs() -> None:
    async def talk(caller: Caller) -> None:
        status, reply = await caller.ask(**CAPTURE)
        choice = reply["choices"][0]
        prompt, sampled = reply["prompt_token_ids"], choice["token_ids"]
        assert status == 200
        assert prompt == prompt_ids(ASK["messages"], TOOLS)
        assert sampled[-1] == Marker.END
        message = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert message == [logprob(len(prompt) + place, token, 3) for place, token in enumerate(sampled)]
        assert reply["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(sampled),
            "total_tokens": len(prompt) + len(sampled),
        }
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        function = choice["message"]["tool_calls"][0]["function"]
        assert (function["name"], json.loads(function["arguments"])) == ("write", WRITE["arguments"])
        assert (caller.last.prompt_ids, caller.last.sampled_ids, caller.last.logprobs) == (prompt, sampled, message)

    play(SCRIPT, talk)


def test_ids_and_logprobs_come_only_when_asked_for() -> None:
    async def talk(caller: Caller) -> None:
        _, reply = await caller.ask()
        assert "prompt_token_ids" not in reply
        assert "token_ids" not in reply["choices"][0]
        assert reply["choices"][0]["logprobs"] is None

    play(SCRIPT, talk)


@pytest.mark.parametrize("size", [1, 3])
def test_a_stream_adds_up_to_the_answer(size: int) -> None:
    async def talk(caller: Caller) -> None:
        for messages in (ASK["messages"], history({"role": "assistant", "content": "so"}, tool_result())):
            _, reply = await caller.ask(messages=messages, **CAPTURE)
            events = await caller.stream(messages=messages, **CAPTURE)
            choice, whole = reply["choices"][0], joined(events)
            assert whole["ids"] == choice["token_ids"]
            assert whole["logprobs"] == [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert whole["content"] == (choice["message"]["content"] or "")
            assert whole["reasoning_content"] == choice["message"].get("reasoning_content", "")
            assert whole["finish"] == choice["finish_reason"]
            calls = choice["message"].get("tool_calls", ())
            assert whole["calls"] == [[call["function"]["name"], call["function"]["arguments"]] for call in calls]

    play({**SCRIPT, "tokens_per_chunk": size}, talk)


def test_the_shape_of_a_stream() -> None:
    async def talk(caller: Caller) -> None:
        first, *chunks, usage, done = await caller.stream(**CAPTURE)
        assert isinstance(first, dict)
        assert isinstance(usage, dict)
        assert first["prompt_token_ids"] == caller.last.prompt_ids
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)  # type: ignore[index]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"  # type: ignore[index]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(caller.last.sampled_ids)
        assert done == "[DONE]"
        assert {event["object"] for event in (first, *chunks, usage)} == {"chat.completion.chunk"}  # type: ignore[index]

    play(SCRIPT, talk)


def test_each_prompt_begins_with_the_prompt_and_completion_before() -> None:
    async def talk(caller: Caller) -> None:
        _, reply = await caller.ask(**CAPTURE)
        message = reply["choices"][0]["message"]
        call = message["tool_calls"][0]["function"]
        call["arguments"] = json.dumps(dict(reversed(json.loads(call["arguments"]).items())))
        await caller.ask(messages=history(message, tool_result()), **CAPTURE)
        before, after = caller.server.log
        expected = before.prompt_ids + before.sampled_ids
        assert after.prompt_ids[: len(expected)] == expected
        assert decode(after.prompt_ids[len(expected) :]) == "<|result|>ok<|end|><|assistant|>"

    play(SCRIPT, talk)


def test_max_tokens_cut_the_answer_off() -> None:
    async def talk(caller: Caller) -> None:
        for name in ("max_tokens", "max_completion_tokens"):
            _, reply = await caller.ask(**CAPTURE, **{name: 4})
            assert reply["choices"][0]["finish_reason"] == "length"
            assert len(reply["choices"][0]["token_ids"]) == 4

    play(SCRIPT, talk)


def test_several_tools_in_one_turn() -> None:
    two = {"turns": [{"text": "Both.", "tools": [{"tool": "a", "arguments": {"x": 1}}, {"tool": "b"}]}]}

    async def talk(caller: Caller) -> None:
        message = (await caller.ask())[1]["choices"][0]["message"]
        assert message["content"] == "Both."
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["a", "b"]
        assert len({call["id"] for call in message["tool_calls"]}) == 2

    play(two, talk)


# -- which turn is played --------------------------------------------------------------------------


def test_the_turn_follows_from_the_messages_alone() -> None:
    async def talk(caller: Caller) -> None:
        later = history({"role": "assistant", "content": "x"}, tool_result())
        answers = await asyncio.gather(
            *(caller.ask(messages=later if odd % 2 else ASK["messages"]) for odd in range(8))
        )
        reasons = [reply["choices"][0]["finish_reason"] for _, reply in answers]
        assert reasons == ["tool_calls", "stop"] * 4
        assert {reply["choices"][0]["message"]["content"] for _, reply in answers[1::2]} == {"All done."}

    play(SCRIPT, talk)


def test_past_the_last_turn_its_text_is_repeated() -> None:
    async def text_after(caller: Caller, turns: int) -> Any:
        messages = history(*({"role": "assistant", "content": "x"} for _ in range(turns)))
        return (await caller.ask(messages=messages))[1]["choices"][0]["message"]["content"]

    async def scripted(caller: Caller) -> None:
        assert await text_after(caller, 9) == "All done."

    async def without_text(caller: Caller) -> None:
        assert await text_after(caller, 1) == "Done."

    play(SCRIPT, scripted)
    play({"turns": [WRITE]}, without_text)


def test_the_first_message_chooses_the_task() -> None:
    script = {"tasks": [{"when": "hello", "turns": [WRITE]}, {"when": "sum", "turns": [{"text": "Six."}]}]}

    async def talk(caller: Caller) -> None:
        assert (await caller.ask())[1]["choices"][0]["finish_reason"] == "tool_calls"
        _, reply = await caller.ask(messages=[{"role": "user", "content": "the sum"}])
        assert reply["choices"][0]["message"]["content"] == "Six."
        status, refusal = await caller.ask(messages=[{"role": "user", "content": "else"}])
        assert status == 400
        assert "no answers for this instruction" in refusal["error"]["message"]
        assert "'hello', 'sum'" in refusal["error"]["message"]

    play(script, talk)


def test_a_request_without_tools_is_a_side_call() -> None:
    async def side(caller: Caller) -> None:
        _, reply = await caller.ask(tools=None, messages=[{"role": "user", "content": "title?"}])
        assert reply["choices"][0]["message"]["content"] == "Scripted rollout"
        assert caller.last.turn is None

    async def only_text(caller: Caller) -> None:
        _, reply = await caller.ask(tools=None)
        assert reply["choices"][0]["message"]["content"] == "Hello."

    play({"tasks": [{"when": "hello", "turns": [WRITE]}]}, side)
    play({"turns": [{"text": "Hello."}]}, only_text)


# -- formats ---------------------------------------------------------------------------------------


def test_sglang_has_ids_in_the_choice_and_none_in_a_stream() -> None:
    async def talk(caller: Caller) -> None:
        _, reply = await caller.ask(**CAPTURE)
        assert reply["choices"][0]["prompt_token_ids"] == caller.last.prompt_ids
        assert reply["choices"][0]["token_ids"] == caller.last.sampled_ids
        assert reply["metadata"] == {"weight_version": "step-4"}
        assert (await caller.ask(**CAPTURE, **STREAM))[0] == 400

    play({**SCRIPT, "engine": "sglang", "weight_version": "step-4"}, talk)


def test_llamacpp_returns_sampled_ids_and_tokenizes_prompts() -> None:
    async def talk(caller: Caller) -> None:
        root = caller.server.url.removesuffix("/v1")
        request = {"messages": ASK["messages"], "tools": TOOLS}
        async with caller.session.post(f"{root}/apply-template", json=request) as answer:
            prompt = (await answer.json())["prompt"]
        async with caller.session.post(f"{root}/tokenize", json={"content": prompt}) as answer:
            ids = (await answer.json())["tokens"]
        assert (await caller.ask(logprobs=True, top_logprobs=0))[1]["choices"][0]["logprobs"] is None
        _, reply = await caller.ask(logprobs=True, top_logprobs=1)
        assert ids == caller.last.prompt_ids
        assert reply["usage"]["prompt_tokens"] == len(ids)
        message = [entry["id"] for entry in reply["choices"][0]["logprobs"]["content"]]
        first_byte = next(token for token in caller.last.sampled_ids if token == "é".encode()[0])
        assert message == [token for token in caller.last.sampled_ids if token != first_byte]
        streamed = await caller.stream(logprobs=True, top_logprobs=1)
        assert len(joined(streamed)["logprobs"]) < len(message)

    play({**SCRIPT, "engine": "llamacpp"}, talk)


@pytest.mark.parametrize(("engine", "logprobs"), [("openai", True), ("text", False)])
def test_plain_endpoints_return_no_ids(engine: str, logprobs: bool) -> None:
    async def talk(caller: Caller) -> None:
        _, reply = await caller.ask(**CAPTURE)
        assert "token_ids" not in reply["choices"][0]
        assert (reply["choices"][0]["logprobs"] is not None) is logprobs

    play({**SCRIPT, "engine": engine}, talk)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp", "openai"])
def test_the_model_list_names_the_engine(engine: str) -> None:
    async def talk(caller: Caller) -> None:
        async with caller.session.get(f"{caller.server.url}/models") as answer:
            (model,) = (await answer.json())["data"]
        assert (model["id"], model["owned_by"]) == ("toy", engine)

    play({**SCRIPT, "engine": engine, "model": "toy"}, talk)


def test_refused_fields_keys_and_bodies() -> None:
    async def talk(caller: Caller) -> None:
        assert (await caller.ask())[0] == 401
        caller.session.headers["Authorization"] = "Bearer right"
        status, reply = await caller.ask(top_k=1)
        assert (status, reply["error"]["code"]) == (400, "unknown_parameter")
        assert (await caller.ask(messages="no"))[0] == 400
        assert (await caller.ask())[0] == 200

    play({**SCRIPT, "rejects": ["top_k"]}, talk, api_key="right")


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_a_prompt_beyond_the_context_is_refused(engine: str) -> None:
    async def talk(caller: Caller) -> None:
        status, reply = await caller.ask()
        named = reply["error"]["code"] if engine == "vllm" else reply["error"]["type"]
        assert (status, named) == (400, {"vllm": "context_length_exceeded"}.get(engine, "exceed_context_size_error"))

    play({**SCRIPT, "engine": engine, "max_context": 10}, talk)


# -- faults ----------------------------------------------------------------------------------------


def with_fault(**fault: Any) -> dict[str, Any]:
    return {**SCRIPT, "faults": [fault]}


def test_a_refusal_comes_once_and_says_when_to_come_back() -> None:
    async def talk(caller: Caller) -> None:
        url = f"{caller.server.url}/chat/completions"
        async with caller.session.post(url, json=ASK) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "3")
        assert (await caller.ask())[0] == 200

    play(with_fault(turn=0, status=429, retry_after=3), talk)


def test_faults_are_counted_per_conversation() -> None:
    async def talk(caller: Caller) -> None:
        for session in ("a", "b"):
            caller.session.headers["x-session-id"] = session
            assert [(await caller.ask())[0] for _ in range(3)] == [500, 500, 200]

    play(with_fault(status=500, times=2), talk)


def test_a_fault_waits_for_its_turn_and_task() -> None:
    async def talk(caller: Caller) -> None:
        assert (await caller.ask())[0] == 200
        assert (await caller.ask(messages=history({"role": "assistant", "content": "x"})))[0] == 400

    play({**SCRIPT, "faults": [{"when": "other", "status": 500}, {"turn": 1, "status": 400}]}, talk)


def test_a_cut_stream_ends_without_a_finish() -> None:
    async def talk(caller: Caller) -> None:
        events = await caller.stream(**CAPTURE)
        assert len(joined(events)["ids"]) == 5
        assert joined(events)["finish"] is None
        assert "[DONE]" not in events
        assert len(caller.last.sampled_ids) == 5
        assert not caller.last.aborted
        assert joined(await caller.stream(**CAPTURE))["finish"] == "tool_calls"

    play(with_fault(cut_after=5), talk)


def test_a_cut_answer_breaks_off() -> None:
    async def talk(caller: Caller) -> None:
        with pytest.raises(aiohttp.ClientPayloadError):
            await caller.ask()
        assert not caller.last.aborted

    play(with_fault(cut_after=5), talk)


def test_an_error_inside_a_stream() -> None:
    async def talk(caller: Caller) -> None:
        *_, last = await caller.stream()
        assert isinstance(last, dict)
        assert last["error"]["message"] == "out of memory"
        assert (await caller.ask())[0] == 200

    play(with_fault(error_chunk="out of memory"), talk)


def test_an_error_chunk_is_a_500_when_nothing_streams() -> None:
    async def talk(caller: Caller) -> None:
        assert (await caller.ask())[0] == 500

    play(with_fault(error_chunk="out of memory"), talk)


def test_a_closed_socket() -> None:
    async def talk(caller: Caller) -> None:
        with pytest.raises(aiohttp.ClientConnectionError):
            await caller.stream()
        assert (caller.last.status, caller.last.aborted) == (None, False)
        assert (await caller.ask())[0] == 200

    play(with_fault(close=True), talk)


def test_a_malformed_answer() -> None:
    async def talk(caller: Caller) -> None:
        with pytest.raises(json.JSONDecodeError):
            await caller.ask()
        with pytest.raises(json.JSONDecodeError):
            await caller.stream()

    play(with_fault(malformed=True, times=2), talk)


@pytest.mark.parametrize("slow", [{"hang": 0.2}, {"delay": 0.2}, {"per_token_delay": 0.2 / 19}])
@pytest.mark.parametrize("stream", [True, False])
def test_slow_answers_are_whole(slow: dict[str, float], stream: bool) -> None:
    async def talk(caller: Caller) -> None:
        begun = asyncio.get_running_loop().time()
        if stream:
            assert joined(await caller.stream())["finish"] == "tool_calls"
        else:
            assert (await caller.ask())[0] == 200
        assert asyncio.get_running_loop().time() - begun >= 0.2

    play(with_fault(**slow), talk)


@pytest.mark.parametrize("slow", [{"hang": 30}, {"delay": 30}, {"per_token_delay": 30}])
def test_a_client_that_hangs_up_is_noticed(slow: dict[str, float]) -> None:
    async def talk(caller: Caller) -> None:
        pending = asyncio.create_task(caller.stream())
        while not caller.server.log:
            await asyncio.sleep(0.005)
        pending.cancel()
        while not caller.last.aborted:
            await asyncio.sleep(0.005)

    (served,) = play(with_fault(**slow), talk)
    assert served.status is None


def test_the_server_ends_while_a_request_hangs() -> None:
    async def talk(caller: Caller) -> None:
        response = asyncio.create_task(caller.ask())
        while not caller.server.log:
            await asyncio.sleep(0.005)
        response.add_done_callback(lambda task: task.exception())

    play(with_fault(hang=60), talk)


# -- recordings ------------------------------------------------------------------------------------


def recording(served: list[ServedRequest], replies: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of a rollout, as `trace show --json` prints it."""
    calls = []
    for one, reply in zip(served, replies, strict=True):
        choice = reply["choices"][0]
        call = {
            "id": f"c{len(calls)}",
            "role": "agent",
            "request": one.request,
            "prompt_token_ids": one.prompt_ids,
            "completion_token_ids": one.sampled_ids,
            "logprobs": one.logprobs,
            "tokens": [entry["token"] for entry in choice["logprobs"]["content"]],
            "message": choice["message"],
            "finish_reason": choice["finish_reason"],
        }
        calls.append(call)
    title = {"role": "title", "message": {"content": "A title"}, "completion_token_ids": [1], "logprobs": [-1.0]}
    return {"rollout_id": "r1", "calls": [title, *calls]}


def record() -> dict[str, Any]:
    replies: list[dict[str, Any]] = []

    async def talk(caller: Caller) -> None:
        messages = ASK["messages"]
        for _ in range(2):
            replies.append((await caller.ask(messages=messages, **CAPTURE))[1])
            messages = [*messages, replies[-1]["choices"][0]["message"], tool_result()]

    return recording(play({**SCRIPT, "seed": 99}, talk), replies)


def test_a_recording_is_answered_with_its_own_ids_and_logprobs(tmp_path: Any) -> None:
    remaining = record()
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(remaining))

    async def talk(caller: Caller) -> None:
        messages = ASK["messages"]
        for call in remaining["calls"][1:]:
            _, reply = await caller.ask(messages=messages, **CAPTURE)
            choice = reply["choices"][0]
            assert reply["prompt_token_ids"] == call["prompt_token_ids"]
            assert choice["token_ids"] == call["completion_token_ids"]
            assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == call["logprobs"]
            assert (choice["message"], choice["finish_reason"]) == (call["message"], call["finish_reason"])
            whole = joined(await caller.stream(messages=messages, **CAPTURE))
            assert (whole["ids"], whole["logprobs"]) == (call["completion_token_ids"], call["logprobs"])
            assert whole["content"] == (call["message"]["content"] or "")
            messages = [*messages, choice["message"], tool_result()]

    play(file, talk)


def test_plain_recorded_text_streams_token_by_token() -> None:
    call = {
        "message": {"content": "Hi you"},
        "prompt_token_ids": [1],
        "completion_token_ids": [5, 6, 2],
        "logprobs": [-0.5, -0.25, -0.125],
        "tokens": ["Hi", " you", "<|im_end|>"],
    }

    async def talk(caller: Caller) -> None:
        events = await caller.stream(**CAPTURE)
        texts = [event["choices"][0]["delta"].get("content") for event in events[1:4]]  # type: ignore[index]
        assert texts == ["Hi", " you", None]

    play({"calls": [call]}, talk)


def test_a_recording_without_ids_is_played_as_text() -> None:
    async def talk(caller: Caller) -> None:
        _, reply = await caller.ask(**CAPTURE)
        assert reply["choices"][0]["message"]["content"] == "Hi you"
        assert reply["choices"][0]["token_ids"]

    play({"calls": [{"message": {"content": "Hi you"}}]}, talk)


# -- files -----------------------------------------------------------------------------------------


def test_a_file_with_lines_holds_several_tasks(tmp_path: Any) -> None:
    lines = [{"model": "toy", "seed": 2}, {"when": "a", "turns": [{"text": "A."}]}, record()]
    file = tmp_path / "script.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    script = Script.load(file)
    assert (script.model, script.seed) == ("toy", 2)
    assert [task.when for task in script.tasks] == ["a", "write hello.py"]


@pytest.mark.parametrize(
    ("content", "explanation"),
    [
        ("{", "not JSON"),
        ("[3]", "not an object"),
        ("{}", "no turns"),
        ('{"turns": []}', "turns"),
        ('{"turns": [{}]}', "`tool`, `tools` or `text`"),
        ('{"turns": [{"tol": "x"}]}', "tol"),
        ('{"turns": [{"text": "x", "arguments": {"a": 1}}]}', "needs `tool`"),
        ('{"turns": [{"text": "x"}], "faults": [{"turn": 1}]}', "needs an effect"),
        ('{"turns": [{"text": "x"}], "engine": "gpt"}', "engine"),
        ('{"tasks": 3}', "is not a script"),
        ('{"calls": 3}', "no list"),
        ('{"calls": [{"role": "title", "message": {"content": "x"}}]}', "no call of an agent"),
    ],
)
def test_an_invalid_script_is_refused_with_the_reason(tmp_path: Any, content: str, explanation: str) -> None:
    file = tmp_path / "script.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=explanation) as caught:
        Script.load(file)
    assert caught.value.hint
    assert str(file) in str(caught.value)


def test_a_missing_script_is_named() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Script.load("nowhere.json")


def test_a_message_about_the_surroundings_may_come_before_the_instruction() -> None:
    script = Script.parse({"tasks": [{"when": "hello.py", "turns": [{"text": "first"}, {"text": "second"}]}]})
    opening = [{"role": "user", "content": "You are on linux."}, {"role": "user", "content": "Write hello.py"}]
    answered = answer(script, {"messages": [*opening, {"role": "assistant", "content": "first"}]})
    assert answered is not None
    assert answered.message["content"] == "second"
