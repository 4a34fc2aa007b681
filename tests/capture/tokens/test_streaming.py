"""What an agent sees of an answer while it is sampled."""

import pytest

from capture.token_engine import sample, tool_call
from capture.tokens.harness import LISTING, tokenizer_folder
from paddock.capture.tokens.rendering import Rendering, open_rendering
from paddock.capture.tokens.streaming import ReplyStream, visible_part
from paddock.capture.tokens.tokenizer import open_tokenizer

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    tokenizer = open_tokenizer(tokenizer_folder())
    return open_rendering(tokenizer, family="qwen3", model="model", thinking=None)


def show(rendering: Rendering, text: str) -> list[tuple[str, str]]:
    """What is shown after each token."""
    prompt = rendering.render([{"role": "user", "content": "Go."}], TOOLS)
    stream = ReplyStream(rendering, prompt, TOOLS)
    texts = []
    for token in sample(text + "<|im_end|>"):
        if stream.feed([token]):
            stream.parse()
        texts.append(stream.visible)
    stream.finish(rendering.parse(stream.ids, prompt, TOOLS))
    return [*texts, stream.visible]


def test_text_flows_and_a_tool_call_is_never_shown(rendering: Rendering) -> None:
    steps = show(rendering, LISTING + tool_call("bash", command="ls"))
    assert steps[-1] == ("I should look at the rollouts first.", "Listing the files now.")
    assert len({content for _, content in steps}) > 4
    assert all("tool_call" not in content and "bash" not in content for _, content in steps)
    assert all(steps[-1][1].startswith(content) for _, content in steps)


def test_a_character_of_several_tokens_is_shown_when_it_is_whole(rendering: Rendering) -> None:
    steps = show(rendering, "A 🙂 and ünïcode, so to say.")
    assert steps[-1][1] == "A 🙂 and ünïcode, so to say."
    assert all("\ufffd" not in content for _, content in steps)


def test_reasoning_is_shown_without_broken_characters(rendering: Rendering) -> None:
    steps = show(rendering, "<think>\nA 🙂 here, and a </th 🙃 there.\n</think>\n\nDone 🙂.")
    assert steps[-1] == ("A 🙂 here, and a </th 🙃 there.", "Done 🙂.")
    assert all(steps[-1][0].startswith(reasoning) for reasoning, _ in steps)
    assert len({reasoning for reasoning, _ in steps}) > 4


def test_a_long_answer_is_parsed_a_limited_number_of_times(rendering: Rendering) -> None:
    stream = ReplyStream(rendering, [0], None)
    times = 0
    for token in sample("word " * 1500):
        if stream.feed([token]):
            times += 1
            stream.parse()
    assert len(stream.ids) > 2000
    assert times < 320


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("Look: <", "Look:"),
        ("Look: <tool", "Look:"),
        ("Look: <tool_call>\n{", "Look:"),
        ("a < b and b > c", "a < b and b > c"),
        ("List<String> is a type", "List<String> is a type"),
        ("so <|python", "so"),
        ('{"name": "bash"', ""),
        ("cut \ufffd", "cut"),
    ],
)
def test_what_may_become_a_marker_is_held_back(text: str, visible: str) -> None:
    assert visible_part(text, has_tools=True) == visible
