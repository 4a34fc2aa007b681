"""A small agent, run in a sandbox as a script: `converse` is its loop, `ask` is one call, the rest are its quirks."""

import http.client
import json
import os
import subprocess
import sys
import urllib.parse
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]

place = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])


def tool(name: str, *parameters: str) -> Message:
    used = {"type": "object", "properties": {each: {"type": "string"} for each in parameters}}
    return {"type": "function", "function": {"name": name, "parameters": used}}


TOOLS = [
    tool("bash", "command"),
    tool("write", "filePath", "content"),
    tool("edit", "filePath", "oldString", "newString"),
    tool("task", "prompt"),
]


def ask(messages: list[Message], tools: list[Message] | None = TOOLS, session: str = "") -> Message:
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    body = {"model": os.environ["PADDOCK_MODEL"], "messages": messages, "logprobs": True, "top_logprobs": 3}
    if tools:
        body["tools"] = tools
    sent = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    if session:
        sent["x-session-id"] = session
    connection.request("POST", place.path + "/chat/completions", json.dumps(body), sent)
    document = json.loads(connection.getresponse().read())
    if "choices" not in document:
        print("gave up:", document)
        sys.exit(1)
    message = document["choices"][0]["message"]
    remaining = ("role", "content", "tool_calls", "reasoning_content")
    return {name: message[name] for name in remaining if message.get(name)}


def act(call: Message) -> str:
    """Do what one tool call asks for."""
    function = call["function"]
    parsed = json.loads(function["arguments"])
    if function["name"] == "bash":
        done = subprocess.run(["/bin/bash", "-c", parsed["command"]], capture_output=True)
        return (done.stdout + done.stderr).decode(errors="replace") or "(no output)"
    if function["name"] == "write":
        with open(parsed["filePath"], "w") as file:
            file.write(parsed["content"])
        return "written"
    if function["name"] == "edit":
        with open(parsed["filePath"]) as file:
            text = file.read()
        if parsed["oldString"] not in text:
            return "Error: the text to replace is not in the file"
        with open(parsed["filePath"], "w") as file:
            file.write(text.replace(parsed["oldString"], parsed["newString"], 1))
        return "edited"
    return "Error: there is no such tool"


def converse(
    messages: list[Message], most: int = 20, handle: Callable[[Message], str] = act, session: str = ""
) -> list[Message]:
    """Until the model calls no tool; the whole conversation."""
    for _ in range(most):
        answer = ask(messages, session=session)
        messages.append(answer)
        for call in answer.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": handle(call)})
        if not answer.get("tool_calls"):
            return messages
    return messages


SYSTEM: Message = {"role": "system", "content": "You are a careful programmer. Use the tools."}


def begin() -> list[Message]:
    return [SYSTEM, {"role": "user", "content": sys.stdin.read()}]


def solve() -> None:
    converse(begin())


def sleep() -> None:
    converse(begin(), most=1)
    subprocess.run(["sleep", "60"])


def branch() -> None:
    """Answers, goes back to the first point, and takes another way."""
    messages = begin()
    first = ask(messages)
    reply = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": act(first["tool_calls"][0])}
    converse([*messages, first, reply])
    converse([*messages, first, {**reply, "content": "Error: something else came of it"}])


def subagent() -> None:
    """Hands a part of its work to another agent."""

    def handle(call: Message) -> str:
        if call["function"]["name"] != "task":
            return act(call)
        prompt = json.loads(call["function"]["arguments"])["prompt"]
        reply = converse([SYSTEM, {"role": "user", "content": prompt}], session="helper")
        return str(reply[-1].get("content", ""))

    messages = begin()
    ask([{"role": "system", "content": "Generate a title for this conversation."}, messages[1]], tools=None)
    converse(messages, handle=handle, session="main")


def compact() -> None:
    """Sums up its conversation, and goes on from the summary."""
    messages = begin()
    reply = converse(messages, most=2)
    request = {"role": "user", "content": "Summarize the conversation so far."}
    summary = ask([*reply, request], tools=None)
    follows = f"{messages[1]['content']}\n\nSo far: {summary['content']}"
    converse([SYSTEM, {"role": "user", "content": follows}])


def retry() -> None:
    """Asks the same twice, as after a lost answer."""
    messages = begin()
    ask(messages)
    converse(messages)


def drift() -> None:
    """Sends back what the model said with other words in it."""
    messages = begin()
    answer = ask(messages)
    answer["content"] = (answer.get("content") or "") + " (as I remember it)"
    messages.append(answer)
    for call in answer.get("tool_calls", ()):
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": act(call)})
    converse(messages)


def image() -> None:
    """Shows the model a picture."""
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAFElEQVR4nGP4z8CAFWEXHbQSACj/P8Fu7N9hAAAAAElFTkSuQmCC"
    messages = begin()
    seen = [
        {"type": "text", "text": messages[1]["content"]},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + pixel}},
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2Zy8+"}},
        {"type": "image_url", "image_url": {"url": "http://192.0.2.1/track.png"}},
    ]
    converse([messages[0], {"role": "user", "content": seen}])


if __name__ == "__main__":
    globals()[sys.argv[1]]()
