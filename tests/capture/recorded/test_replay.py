"""Which recorded call answers a request, and when a rollout has left the recorded one."""

from typing import Any

import pytest

from paddock.capture.recorded.conversation import SAME_AS_BEFORE
from paddock.capture.recorded.replay import Edit, Replay
from paddock.capture.trace import Call, Role
from paddock.errors import ConfigError

Message = dict[str, Any]
USER: Message = {"role": "user", "content": "Fix it."}


def runs(command: str, call_id: str = "c") -> Message:
    function = {"name": "bash", "arguments": f'{{"command": "{command}"}}'}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}]}


def output(text: str, call_id: str = "c") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def call(index: int, messages: list[Message], answer: Message, **fields: Any) -> Call:
    return Call(f"c{index}", index, request={"messages": messages}, message=answer, ended=1.0, **fields)


FIRST = [USER]
SECOND = [USER, runs("ls"), output("a.txt")]
THIRD = [*SECOND, runs("cat a.txt"), output("hello")]
RECORDED = [
    call(0, FIRST, runs("ls")),
    call(1, SECOND, runs("cat a.txt")),
    call(2, THIRD, {"role": "assistant", "content": "Done."}),
]


def replay(calls: list[Call] | None = None, at: int | None = 2, **options: Any) -> Replay:
    chosen = RECORDED if calls is None else calls
    return Replay("r1", chosen, lambda each: each.request["messages"], at=at, **options)


def answers(one: Replay, *requests: list[Message]) -> list[str | None]:
    """The recorded calls that answer requests; None is a live call."""
    matches = [one.match(f"n{number}", request) for number, request in enumerate(requests)]
    assert [match.divergence for match in matches] == [None] * len(requests)
    return [None if match.recorded is None else match.recorded.id for match in matches]


def test_calls_before_the_fork_are_answered_from_the_record() -> None:
    one = replay()
    assert answers(one, FIRST, SECOND, THIRD) == ["c0", "c1", None]
    assert (one.report.state, len(one.report.calls)) == ("equal", 2)


def test_requests_are_matched_by_content_and_not_by_order() -> None:
    helper = [{"role": "user", "content": "Search for it."}]
    calls = [
        *RECORDED[:2],
        call(2, helper, {"content": "Here."}, role=Role.SUBAGENT),
        call(3, THIRD, {"content": "x"}),
    ]
    assert answers(replay(calls, at=3), helper, FIRST, SECOND, THIRD) == ["c2", "c0", "c1", None]


def test_a_difference_in_times_is_none() -> None:
    calls = [
        call(0, FIRST, runs("date")),
        call(1, [USER, runs("date"), output("21:08:55")], {"content": "It is late."}),
    ]
    one = replay(calls, at=2)
    assert answers(one, FIRST, [USER, runs("date"), output("03:04:05")]) == ["c0", "c1"]
    assert one.report.state == "equal"


def test_another_tool_output_is_reported_with_its_difference() -> None:
    one = replay()
    assert answers(one, FIRST, [USER, runs("ls"), output("b.txt")]) == ["c0", "c1"]
    assert one.report.state == "tool_output"
    (entry,) = one.report.to_json()["different_calls"]
    assert entry["recorded"] == "c1"
    assert "-a.txt" in entry["difference"]
    assert "+b.txt" in entry["difference"]


def test_each_different_output_is_reported_once() -> None:
    requests = [[*SECOND[:2], output("b.txt")], [*SECOND[:2], output("b.txt"), runs("cat a.txt"), output("bye")]]
    last = [*THIRD, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks."}]
    one = replay([*RECORDED, call(3, last, {"content": "x"})], at=4)
    answers(one, FIRST, *requests, [*requests[1], *last[-2:]])
    first, second, third = (entry["difference"] for entry in one.report.to_json()["different_calls"])
    assert "+b.txt" in first
    assert "+b.txt" not in second
    assert "+bye" in second
    assert third == SAME_AS_BEFORE


def summary_of(*lines: str) -> list[Message]:
    return [{"role": "user", "content": "\n".join(["Summarize this.", *lines])}]


@pytest.mark.parametrize(
    ("quoted", "state"),
    [
        (("[Tool result]: b.txt", "other.txt"), "tool_output"),
        (("[Tool result]: b.txt", "oth", "[... 12 more characters truncated]"), "tool_output"),
        (("[Tool result]: b.txt", "unheard of"), "same_shape"),
    ],
)
def test_a_quoted_tool_output_is_no_other_difference(quoted: tuple[str, ...], state: str) -> None:
    ends = quoted[2:] and ("[... 7 more characters truncated]",)
    calls = [*RECORDED[:2], call(2, summary_of("[Tool result]: a.txt", *ends), {"content": "Files."})]
    one = replay(calls, at=3)
    listed = [USER, runs("ls"), output("b.txt\nother.txt")]
    assert answers(one, FIRST, listed, summary_of(*quoted)) == ["c0", "c1", "c2"]
    assert one.report.state == state


def test_a_strict_replay_stops_at_another_tool_output() -> None:
    one = replay(policy="strict")
    one.match("n0", FIRST)
    match = one.match("n1", [USER, runs("ls"), output("b.txt")])
    assert match.divergence is not None
    assert "diverged from r1 at call c1" in match.divergence
    assert one.report.state == "diverged"


def test_another_shape_is_a_divergence() -> None:
    one = replay()
    one.match("n0", FIRST)
    match = one.match("n1", [USER, runs("rm -r ."), output("")])
    assert match.recorded is None
    assert match.divergence is not None
    assert "rm -r" in match.divergence
    assert one.report.diverged_at == "c1"


def test_a_repeated_request_gets_the_same_answer_again() -> None:
    assert answers(replay(), FIRST, FIRST, SECOND) == ["c0", "c0", "c1"]


def test_after_the_first_live_call_nothing_has_to_match() -> None:
    one = replay(at=1)
    assert answers(one, FIRST, SECOND, [*SECOND, runs("pwd"), output("/work")]) == ["c0", None, None]


def test_failed_and_repeated_calls_are_sampled_live() -> None:
    failed = call(1, SECOND, {}, error="the endpoint failed", role=Role.RETRIED)
    last = call(2, SECOND, {}, error="the endpoint failed")
    assert answers(replay([RECORDED[0], failed, last], at=None), FIRST, SECOND) == ["c0", None]


def test_a_continuation_goes_on_where_the_record_ends() -> None:
    assert answers(replay(RECORDED[:2], at=None), FIRST, SECOND, THIRD) == ["c0", "c1", None]


def test_a_continuation_may_begin_a_conversation_that_was_not_recorded() -> None:
    helper = [{"role": "user", "content": "Search for it."}]
    assert answers(replay(at=None), FIRST, helper, SECOND) == ["c0", None, "c1"]


def test_an_edited_answer_replaces_the_recorded_one() -> None:
    one = replay(at=1, edit=Edit(answer={"content": "I stop."}))
    one.match("n0", FIRST)
    edited = one.match("n1", SECOND).recorded
    assert edited is not None
    assert edited.message == {"role": "assistant", "content": "I stop."}
    assert edited.finish_reason == "stop"
    assert not edited.trainable


def test_an_edited_tool_result_is_sent_in_place_of_the_recorded_one() -> None:
    one = replay(at=2, edit=Edit(tool_result="permission denied"))
    sent, replaced = one.rewrite(THIRD)
    assert [message.get("content") for message in sent if message["role"] == "tool"] == ["a.txt", "permission denied"]
    assert list(replaced.values()) == ["permission denied"]
    assert THIRD[-1]["content"] == "hello"


def test_a_fork_of_a_fork_keeps_the_edited_tool_result() -> None:
    _, replaced = replay(at=2, edit=Edit(tool_result="permission denied")).rewrite(THIRD)
    calls = [*RECORDED[:2], call(2, THIRD, {"content": "Done."}, tool_results=replaced)]
    assert replay(calls, at=3).rewrite(THIRD)[1] == replaced
    assert replay(calls, at=1).rewrite(THIRD)[1] == {}


def test_of_equal_conversations_the_nearest_is_taken() -> None:
    """Two sub-agents whose prompts differ in a port alone, which is masked."""
    prompts = [[{"role": "user", "content": f"Ask localhost:{port}."}] for port in (8001, 8002)]
    calls = [call(index, prompt, {"content": "Here."}) for index, prompt in enumerate(prompts)]
    assert answers(replay(calls), prompts[1], prompts[0]) == ["c1", "c0"]


def test_of_conversations_of_one_shape_the_most_similar_is_taken() -> None:
    prompts = [[{"role": "user", "content": f"Look at {place}. Token {place}x."}] for place in ("alpha", "omega")]
    calls = [call(index, prompt, {"content": "Here."}) for index, prompt in enumerate(prompts)]
    request = [{"role": "user", "content": "Look at omega. Token other."}]
    assert answers(replay(calls), request) == ["c1"]


def test_a_request_is_not_answered_again_once_sampling_is_live() -> None:
    assert answers(replay(at=1), FIRST, SECOND, FIRST) == ["c0", None, None]


def test_a_repeated_request_is_preferred_to_another_conversation_of_its_shape() -> None:
    prompts = [[{"role": "user", "content": f"Look at {place}."}] for place in ("alpha", "omega")]
    calls = [call(index, prompt, {"content": "Here."}) for index, prompt in enumerate(prompts)]
    assert answers(replay(calls), prompts[0], prompts[0], prompts[1]) == ["c0", "c0", "c1"]


def test_an_error_before_the_fork_is_sent_again() -> None:
    calls = [RECORDED[0], call(1, SECOND, {}, error="the prompt is too long", status=400), RECORDED[2]]
    assert answers(replay(calls, at=2), FIRST, SECOND) == ["c0", "c1"]


def test_an_abandoned_call_before_the_fork_is_sampled_without_ending_the_replay() -> None:
    title = [{"role": "user", "content": "A title."}]
    calls = [call(0, title, {}, aborted=True), call(1, FIRST, runs("ls")), call(2, SECOND, {"content": "Done."})]
    one = replay(calls, at=3)
    assert answers(one, title, FIRST) == [None, "c1"]
    assert one.match("n2", [USER, runs("pwd"), output("/work")]).divergence is not None


def test_every_call_can_be_replayed() -> None:
    assert answers(replay(at=3), FIRST, SECOND, THIRD) == ["c0", "c1", "c2"]


@pytest.mark.parametrize("values", [{}, {"answer": {"content": "a"}, "tool_result": "b"}])
def test_an_edit_is_one_change(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="an edit has an answer or a tool_result"):
        Edit(**values)


def test_a_tool_result_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="c0 follows no tool result"):
        replay(at=0, edit=Edit(tool_result="x"))


@pytest.mark.parametrize(("at", "message"), [(3, "has no call c3 to edit"), (1, "the agent repeated c1")])
def test_an_edit_needs_a_call_that_was_answered(at: int, message: str) -> None:
    calls = [RECORDED[0], call(1, SECOND, {}, role=Role.RETRIED), RECORDED[2]]
    with pytest.raises(ConfigError, match=message):
        replay(calls, at=at, edit=Edit(answer={"content": "I stop."}))
