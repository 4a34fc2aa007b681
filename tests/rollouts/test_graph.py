"""What the graph says of conversations that go on, fork, are summed up, or come back in other tokens."""

from paddock.capture.trace import Call, Role
from paddock.rollouts.graph import Drift, Graph, Label

SYSTEM = [1, 2, 3]
END = 9


def conversation(count: int) -> list[Call]:
    """Each prompt is the one before, its answer, and a tool's output."""
    calls, prompt = [], [*SYSTEM, 50]
    for index in range(count):
        sampled = [100 + index, 200 + index, END]
        calls.append(make(index, prompt, sampled))
        prompt = [*prompt, *sampled, 60 + index]
    return calls


def make(index: int, prompt: list[int], sampled: list[int], role: Role = Role.AGENT) -> Call:
    return Call(
        f"c{index}",
        index,
        role=role,
        prompt_token_ids=prompt,
        completion_token_ids=sampled,
        logprobs=[-0.5] * len(sampled),
    )


def labels(calls: list[Call]) -> list[str]:
    return [node.label.value for node in Graph.of(calls).nodes.values()]


def ids(branches: list[list[Call]]) -> list[list[str]]:
    return [[call.id for call in branch] for branch in branches]


def test_a_conversation_is_one_branch_without_drift() -> None:
    graph = Graph.of(conversation(3))
    assert ids(graph.branches()) == [["c0", "c1", "c2"]]
    assert labels(conversation(3)) == ["main"] * 3
    assert graph.nodes["c1"].parent == graph.nodes["c1"].continues == "c0"
    assert graph.nodes["c0"].children == ["c1"]
    assert graph.nodes["c0"].drift == Drift(3, 3, None)
    assert graph.nodes["c2"].drift is None


def test_a_fork_is_a_branch_and_shares_its_beginning() -> None:
    calls = conversation(3)
    fork = make(3, [*calls[0].prompt_token_ids, *calls[0].completion_token_ids, 77], [300, END])
    further = make(4, [*fork.prompt_token_ids, 300, END, 78], [301, END])
    graph = Graph.of([*calls, fork, further])
    assert ids(graph.branches()) == [["c0", "c1", "c2"], ["c0", "c3", "c4"]]
    assert [graph.nodes[name].label for name in ("c3", "c4")] == [Label.BRANCH, Label.BRANCH]


def test_an_answer_in_other_tokens_is_the_same_conversation_with_drift() -> None:
    first = make(0, [1, 2], [5, 6, 7, END])
    second = make(1, [1, 2, 5, 8, END, 40], [5, END])
    graph = Graph.of([first, second])
    assert graph.nodes["c1"].label is Label.MAIN
    assert (graph.nodes["c1"].parent, graph.nodes["c1"].continues) == ("c0", None)
    assert graph.nodes["c1"].shared_tokens == 3
    assert graph.nodes["c0"].drift == Drift(sampled=4, returned=3, first_difference=1)
    assert ids(graph.branches()) == [["c0"], ["c1"]]


def test_an_answer_that_does_not_end_counts_what_is_the_same() -> None:
    graph = Graph.of([make(0, [1, 2], [5, 6, 7]), make(1, [1, 2, 5, 40, 41], [3])])
    assert graph.nodes["c0"].drift == Drift(sampled=3, returned=1, first_difference=1)


def test_roles_are_labels() -> None:
    calls = conversation(2)
    others = [
        make(2, [7, 7], [1], Role.TITLE),
        make(3, [8, 8], [1], Role.SUBAGENT),
        make(4, [*calls[1].prompt_token_ids, 1], [1], Role.COMPACTION),
        make(5, [7], [1], Role.RETRIED),
    ]
    assert labels([*calls, *others])[2:] == ["title", "subagent", "compaction", "retried"]


def test_a_history_that_was_summed_up_is_edited_and_then_goes_on() -> None:
    calls = conversation(3)
    summed = make(3, [*SYSTEM, 90, 91], [400, END])
    after = make(4, [*SYSTEM, 90, 91, 400, END, 61], [401, END])
    assert labels([*calls, summed, after]) == ["main", "main", "main", "edited", "main"]
    assert ids(Graph.of([*calls, summed, after]).branches())[-1] == ["c3", "c4"]


def test_a_change_in_the_middle_is_edited_if_the_latest_answer_is_still_there() -> None:
    calls = conversation(4)
    old = calls[3].prompt_token_ids + calls[3].completion_token_ids
    at = old.index(61)
    cut = make(4, [*old[:at], 555, *old[at + 1 :], 70], [500, END])
    assert labels([*calls, cut])[-1] == "edited"
    back = make(4, [*old[:at], 555, 556], [500, END])
    assert labels([*calls, back])[-1] == "branch"


def test_the_same_prompt_again_is_a_branch_and_a_dropped_answer_is_none() -> None:
    first, again = make(0, [1, 2], [5, END]), make(1, [1, 2], [6, END])
    assert labels([first, again]) == ["main", "branch"]
    first.role = Role.RETRIED
    follow = make(2, [1, 2, 6, END, 3], [7, END])
    assert labels([first, again, follow]) == ["retried", "main", "main"]
    assert ids(Graph.of([first, again, follow]).branches()) == [["c0"], ["c1", "c2"]]


def test_calls_without_ids_stand_alone_and_order_does_not_matter() -> None:
    calls = conversation(3)
    mute = Call("c3", 3, role=Role.AGENT)
    graph = Graph.of([mute, *calls[::-1]])
    assert list(graph.nodes) == ["c0", "c1", "c2", "c3"]
    assert ids(graph.branches()) == [["c0", "c1", "c2"]]


def test_nothing_is_an_empty_graph() -> None:
    assert Graph.of([]).branches() == []
