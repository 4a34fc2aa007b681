"""Text for the policy: its few words as tokens, its chat template, and both as a tokenizer that token mode opens.

Every text has one sequence of tokens, and the policy calls a tool as models of the Qwen family do: JSON between
`<tool_call>` and `</tool_call>`. Nothing here samples or trains.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = ("<pad>", "<end>", "<unknown>", "<tool_call>", "</tool_call>")
PAD, END, UNKNOWN, CALL, CALLED = range(len(SPECIAL))
TOOLS = ("guess", "pick")
OPENINGS = {name: f'{{"name": "{name}", "arguments": {{"number": ' for name in TOOLS}
"""One token each: what the policy chooses is the tool and the number."""
CLOSING = "}}"
NAMES = [
    *SPECIAL,
    *OPENINGS.values(),
    *(CLOSING, "\n", ">", " "),
    *(
        "find",
        " a",
        " number",
        " from",
        " to",
        "name",
        " the",
        " after",
        "found",
        "higher",
        "lower",
        "right",
        "wrong",
    ),
    *"0123456789",
]
IDS = {word: number for number, word in enumerate(NAMES)}
WORD = "|".join([*map(re.escape, (*SPECIAL, *OPENINGS.values(), CLOSING)), " ?[a-z]+", r"[\s\S]"])
CALL_TEXT = re.compile(r'<tool_call>\{"name": "([a-z]+)", "arguments": \{"number": (0|[1-9][0-9]*)\}\}</tool_call>')
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>"
    '{"name": "{{ call[\'function\'][\'name\'] }}", "arguments": '
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}}"
    "</tool_call>{% endfor %}<end>{% else %}{{ message['content'] }}\n>{% endif %}{% endfor %}"
)


def encode(text: str) -> list[int]:
    return [IDS.get(word, UNKNOWN) for word in re.findall(WORD, text)]


def decode(ids: list[int]) -> str:
    """All tokens but a last END."""
    return "".join(NAMES[token] for token in (ids[:-1] if ids[-1:] == [END] else ids))


def call_ids(tool: str, number: int) -> list[int]:
    """A call of a tool as the policy writes it."""
    return [CALL, IDS[OPENINGS[tool]], *encode(str(number)), IDS[CLOSING], CALLED, END]


def prompt_ids(messages: list[dict[str, Any]]) -> list[int]:
    """The conversation up to where the policy goes on: what the template says."""
    ids: list[int] = []
    for message in messages:
        if message["role"] == "assistant":
            ids += [*encode(written(message)), END]
        else:
            ids += encode(f"{message['content']}\n>")
    return ids


def written(message: dict[str, Any]) -> str:
    """An assistant message as the policy wrote it."""
    text = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        arguments = json.dumps(json.loads(call["function"]["arguments"]))
        text += f'<tool_call>{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}</tool_call>'
    return text


def read(text: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """What the policy wrote as an assistant message: a call of a tool if it is exactly one, else plain text."""
    match = CALL_TEXT.fullmatch(text)
    if match is None or match[1] not in {tool["function"]["name"] for tool in tools}:
        return {"role": "assistant", "content": text}
    function = {"name": match[1], "arguments": json.dumps({"number": int(match[2])})}
    call = {"index": 0, "id": "call", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def write_tokenizer(folder: Path) -> Path:
    """The words as a folder with `tokenizer.json` and a chat template, as a model's repository has them."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "<pad>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
