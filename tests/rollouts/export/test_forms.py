"""Every form, in its written shape: lengths fit, masks are derived, and nothing unscored slips in."""

import json
from typing import Any

import pytest

from paddock.errors import ConfigError
from paddock.rollouts.export import FORMS, load_form
from paddock.rollouts.export.policy import Policy
from paddock.rollouts.export.samples import samples
from paddock.rollouts.outcome import Outcome
from paddock.rollouts.trace import Call, Caller, LogprobsKind, Role
from rollouts.export.rollouts import END, call, conversation, forked, record

TRAINED = [form for form in FORMS if form != "replay"]


def exported(form: str, calls: list[Call], policy: Policy | None = None, **about: Any) -> list[dict[str, Any]]:
    return list(load_form(form).export(record(**about), calls, policy or Policy()))


def complaints(form: str, document: dict[str, Any]) -> list[str]:
    return list(load_form(form).complaints(document))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("calls", [conversation(3), forked()], ids=["conversation", "forked"])
def test_what_is_exported_is_right(form: str, calls: list[Call]) -> None:
    documents = exported(form, calls)
    assert documents
    assert [complaints(form, document) for document in documents] == [[]] * len(documents)


@pytest.mark.parametrize("form", TRAINED)
def test_a_rollout_that_nobody_scored_is_left_out_or_flagged(form: str) -> None:
    unscored = {"reward": None, "outcome": Outcome.VERIFIER, "reward_reason": "the tests hung"}
    assert exported(form, conversation(), **unscored) == []
    (document,) = exported(form, conversation(), Policy(unscored="flag"), **unscored)[:1]
    assert set(complaints(form, document)) == {"it has no reward"}


@pytest.mark.parametrize("form", TRAINED)
def test_nothing_to_train_on_is_nothing(form: str) -> None:
    calls = conversation(2)
    for each in calls:
        each.aborted = True
    if form == "atif":
        masks = [
            step["extra"]["loss_mask"] for step in exported(form, calls)[0]["steps"] if step["source"] == "agent"
        ]
        assert masks == [0, 0]
    else:
        assert exported(form, calls) == []


@pytest.mark.parametrize("form", FORMS)
def test_every_form_tells_the_temperature_and_which_logprobs_it_has(form: str) -> None:
    calls = conversation(2, forwarded={}, temperature=0.625, logprobs_kind=LogprobsKind.PROCESSED)
    text = json.dumps(exported(form, calls))
    assert "0.625" in text
    assert "processed" in text


@pytest.mark.parametrize("form", TRAINED)
def test_a_call_of_another_process_is_left_out(form: str) -> None:
    foreign = call(3, [7, 7], [4321, END], caller=Caller.FOREIGN, caller_reason="curl")
    document = json.dumps(exported(form, [*conversation(2), foreign]))
    if form not in ("atif", "verifiers"):
        assert "4321" not in document
    assert [*samples(record(), [foreign])] == []
    assert Policy().refusals([foreign]) == ["another process than the agent's program made it: curl"]


def test_an_unknown_form_names_the_others() -> None:
    with pytest.raises(ConfigError) as caught:
        load_form("parkett")
    assert all(form in (caught.value.hint or "") for form in FORMS)


# -- each in its own shape ------------------------------------------------------------------------


def test_trl_rows_and_columns() -> None:
    from paddock.rollouts.export.trl import columns

    (row,) = exported("trl", conversation(2))
    assert row["prompt_ids"] == [1, 2, 3]
    assert row["completion_ids"] == [100, 200, END, 60, 101, 201, END]
    assert row["env_mask"] == [1, 1, 1, 0, 1, 1, 1]
    table = columns(samples(record(), forked()))
    assert {len(column) for column in table.values()} == {3}
    assert columns([]) == {"prompt_ids": [], "completion_ids": [], "logprobs": []}


def test_skyrl_marks_the_last_row_of_a_rollout() -> None:
    (output,) = exported("skyrl", forked(), member=3)
    assert output["is_last_step"] == [False, False, True]
    assert output["trajectory_ids"] == [{"instance_id": "b1/t1", "repetition_id": 3}] * 3
    assert output["rewards"] == [0.5] * 3
    assert output["stop_reasons"] == ["stop"] * 3


def test_verl_tells_how_stale_it_is() -> None:
    calls = conversation(2)
    calls[0].weight_version, calls[1].weight_version = "step-4", "step-6"
    (output,) = exported("verl", calls, reward_parts={"tests": 0.5})
    extra = output["extra_fields"]
    assert (extra["min_global_steps"], extra["max_global_steps"]) == (4, 6)
    assert extra["reward_extra_info"] == {"tests": 0.5}
    assert output["metrics"] == {"generate_sequences": 1.0}
    assert "min_global_steps" not in exported("verl", conversation(1))[0]["extra_fields"]


def test_prime_has_one_flat_sequence() -> None:
    (sample,) = exported("prime", conversation(2, forwarded={"temperature": 0.7}))
    assert sample["token_ids"] == [1, 2, 3, 100, 200, END, 60, 101, 201, END]
    assert sample["mask"] == [False] * 3 + [True] * 3 + [False] + [True] * 3
    assert sample["temperatures"] == [0.7] * 10
    assert sample["env_name"] == "t1"


def test_verifiers_branches_are_ours() -> None:
    (trace,) = exported("verifiers", forked())
    nodes = trace["nodes"]
    paths = []
    parents = {node["parent"] for node in nodes}
    for leaf in (number for number in range(len(nodes)) if number not in parents):
        path, current = [], leaf
        while current is not None:
            path.append(current)
            current = nodes[current]["parent"]
        paths.append([token for number in reversed(path) for token in nodes[number]["token_ids"]])
    assert [1, 2, 3, 100, 200, END, 60, 101, 201, END, 61, 102, 202, END] in paths
    assert [1, 2, 3, 100, 200, END, 77, 51, 52, END] in paths
    sampled = [node for node in nodes if node["sampled"]]
    assert [any(node["mask"]) for node in sampled] == [True, True, True, True, False, True, False]


def test_slime_siblings_share_their_rollout_and_have_a_status() -> None:
    lines = exported("slime", forked(), instruction="do it")
    assert {line["rollout_id"] for line in lines} == {"r1"}
    assert [line["status"] for line in lines] == ["completed"] * 3
    assert lines[0]["tokens"][-lines[0]["response_length"] :] == [100, 200, END, 60, 101, 201, END, 61, 102, 202, END]
    assert lines[0]["response"] == "said 0\nsaid 1\nsaid 2"
    (cut,) = exported("slime", conversation(1, finish_reason="length"))
    assert cut["status"] == "truncated"
    (late,) = exported("slime", conversation(1), outcome=Outcome.TIMEOUT)
    assert late["status"] == "truncated"


def test_tinker_targets_are_one_ahead() -> None:
    from paddock.rollouts.export.tinker import datum

    (sample,) = samples(record(), conversation(2))
    found = datum(sample, advantage=-2.0)
    tokens = found["model_input"]["chunks"][0]["tokens"]
    inputs = {name: each["data"] for name, each in found["loss_fn_inputs"].items()}
    assert tokens[1:] == inputs["target_tokens"][:-1]
    assert inputs["mask"] == [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    assert inputs["advantages"] == [-2.0 * each for each in inputs["mask"]]
    assert inputs["target_tokens"][2] == 100
    assert inputs["logprobs"][2] == -0.25


def talk() -> list[Call]:
    """A call with a tool, its result, an answer; a subagent in between."""
    user = {"role": "user", "content": "fix it"}
    system = {"role": "system", "content": "be good"}
    ask = {"id": "t1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [ask]}
    result = {"role": "tool", "tool_call_id": "t1", "content": "a.py"}
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
    return [
        call(0, [1], [2, END], request={"messages": [system, user], "tools": tools}, message=said),
        call(1, [7], [8], Role.SUBAGENT, session="s2", started=1000.2),
        call(2, [1, 2, END, 5], [6, END], request={"messages": [system, user, said, result], "tools": tools}),
    ]


def test_atif_puts_results_with_their_calls_and_helpers_beside() -> None:
    (trajectory,) = exported("atif", talk())
    steps = trajectory["steps"]
    assert [step["source"] for step in steps] == ["system", "user", "agent", "agent"]
    assert [step["step_id"] for step in steps] == [1, 2, 3, 4]
    results = steps[2]["observation"]["results"]
    assert {"source_call_id": "t1", "content": "a.py"} in results
    assert {"subagent_trajectory_ref": [{"trajectory_id": "r1/c1"}]} in results
    assert [each["trajectory_id"] for each in trajectory["subagent_trajectories"]] == ["r1/c1"]
    assert steps[2]["tool_calls"][0]["arguments"] == {"command": "ls"}
    assert steps[3]["metrics"]["completion_token_ids"] == [6, END]
    assert trajectory["final_metrics"]["extra"]["reward"] == 0.5


def test_atif_marks_a_rewritten_history_as_copied() -> None:
    calls = talk()
    summary = {"messages": [{"role": "system", "content": "be good"}, {"role": "user", "content": "so far: ls"}]}
    (trajectory,) = exported("atif", [*calls, call(3, [1, 9], [4, END], request=summary)])
    copied = [step for step in trajectory["steps"] if step.get("is_copied_context")]
    assert [step["message"] for step in copied] == ["be good", "so far: ls"]


@pytest.mark.parametrize("written", ["not json", '["a"]', ""])
def test_atif_keeps_arguments_that_are_no_object(written: str) -> None:
    from paddock.rollouts.export.atif import tool_call

    found = tool_call({"id": "x", "function": {"name": "f", "arguments": written}})
    assert found["arguments"] == ({"": written} if written else {})


# -- what the checks catch ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"logprobs": [float("nan")] * 3}, "logprobs holds a value that is not finite"),
        ({"logprobs": [0.5] * 3}, "logprobs holds 0.5, and no probability is above 1"),
        ({"logprobs": [-0.5] * 2}, "lengths differ: completion_ids 3, logprobs 2, env_mask 3"),
        ({"env_mask": [0, 0, 0], "logprobs": [0.0] * 3}, "env_mask lets nothing be trained on"),
        ({"env_mask": [1, 2, 1]}, "env_mask holds something else than 0 and 1"),
        ({"env_mask": [1, 0, 1]}, "logprobs is not 0 where the mask is"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"completion_ids": [1, -2, 3]}, "completion_ids holds something that is no token id"),
        ({"reward": float("inf")}, "the reward inf is no finite number"),
        ({"reward": None}, "it has no reward"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_spoilt_row_is_noticed(change: dict[str, Any], expected: str) -> None:
    (row,) = exported("trl", conversation(1))
    assert complaints("trl", {**row, **change}) == [expected]
