"""Sequences to train on: exact prefixes only, every sampled token once, nothing unscored."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.rollouts import END, call, conversation, forked, record
from paddock.capture.trace import Call, Role
from paddock.errors import ConfigError
from paddock.export.policy import in_order, versions_behind
from paddock.export.samples import Policy, Sample, samples
from paddock.store.outcome import Outcome


def made(calls: list[Call], policy: Policy | None = None, reward: float | None = 0.5) -> list[Sample]:
    return list(samples(record(reward=reward), calls, policy or Policy()))


def test_a_conversation_is_one_sample() -> None:
    (sample,) = made(conversation(2))
    assert sample.prompt_ids == [1, 2, 3]
    assert sample.response_ids == [100, 200, END, 60, 101, 201, END]
    assert sample.mask == [1, 1, 1, 0, 1, 1, 1]
    assert sample.logprobs == [-0.25, -0.375, -0.5, 0.0, -0.25, -0.375, -0.5]
    assert (sample.calls, sample.label, sample.is_last) == (("c0", "c1"), "main", True)
    assert (sample.group_id, sample.reward, sample.outcome) == ("b1/t1", 0.5, "ok")


def test_every_sampled_token_is_trained_on_in_one_sample_only() -> None:
    first, second, third = made(forked())
    assert [sample.calls for sample in (first, second, third)] == [("c0", "c1", "c2"), ("c3",), ("c5",)]
    assert third.prompt_ids == [1, 2, 3, 100, 200, END, 77]
    assert (third.response_ids, third.mask) == ([51, 52, END], [1, 1, 1])
    assert [sample.label for sample in (first, second, third)] == ["main", "subagent", "branch"]
    assert [sample.is_last for sample in (first, second, third)] == [False, False, True]


def test_an_answer_that_came_back_in_other_tokens_begins_a_new_sample() -> None:
    calls = [call(0, [1, 2], [5, 6, END]), call(1, [1, 2, 5, 7, END, 40], [8, END])]
    first, second = made(calls)
    assert (first.prompt_ids, first.response_ids) == ([1, 2], [5, 6, END])
    assert (second.prompt_ids, second.response_ids) == ([1, 2, 5, 7, END, 40], [8, END])


@pytest.mark.parametrize(
    "spoilt",
    [{"aborted": True}, {"error": "boom"}, {"logprobs": [-0.5]}, {"role": Role.TITLE}],
    ids=["aborted", "failed", "logprobs", "role"],
)
def test_what_may_not_be_trained_on_is_masked_in_the_middle_and_cut_off_at_the_ends(
    spoilt: dict[str, object],
) -> None:
    calls = conversation(3)
    for name, value in spoilt.items():
        setattr(calls[1], name, value)
    (sample,) = made(calls)
    assert sample.mask == [1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    assert sample.logprobs[3:8] == [0.0] * 5
    for name, value in spoilt.items():
        setattr(calls[0], name, value)
    (sample,) = made(calls)
    assert (sample.calls, sample.prompt_ids) == (("c2",), calls[2].prompt_token_ids)


def test_a_rollout_without_a_reward_is_left_out_or_flagged_and_never_zero() -> None:
    assert made(conversation(), reward=None) == []
    (sample,) = made(conversation(), Policy(unscored="flag"), reward=None)
    assert sample.reward is None
    assert sample.metadata["unscored"] == "it ended with ok"
    (zero,) = made(conversation(), reward=0.0)
    assert zero.reward == 0.0
    assert "unscored" not in zero.metadata


def test_a_rollout_that_runs_has_no_samples() -> None:
    running = record(outcome=None)
    assert list(samples(running, conversation(), Policy(unscored="flag"))) == []
    assert list(samples(record(outcome=Outcome.TIMEOUT), conversation())) != []


def test_roles_choose_the_calls() -> None:
    assert [sample.calls for sample in made(forked(), Policy(roles=frozenset([Role.SUBAGENT])))] == [("c3",)]
    with pytest.raises(ConfigError):
        Policy(roles=frozenset([Role.RETRIED]))


def versions(*names: str | None) -> list[Call]:
    calls = conversation(len(names))
    for each, version in zip(calls, names, strict=True):
        each.weight_version = version
    return calls


def trained(calls: list[Call], policy: Policy) -> list[str]:
    """The calls whose tokens may be trained on, in whichever sample."""
    trained = set()
    for sample in made(calls, policy):
        ids = sample.prompt_ids + sample.response_ids
        mask = [0] * len(sample.prompt_ids) + sample.mask
        for each in calls:
            at = len(each.prompt_token_ids)
            if ids[:at] == each.prompt_token_ids and mask[at : at + 3] == [1, 1, 1]:
                trained.add(each.id)
    return sorted(trained)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy(weights="any"), ["c0", "c1", "c2"]),
        (Policy(weights="newest"), ["c2"]),
        (Policy(weights=1), ["c1", "c2"]),
        (Policy(weights=2), ["c0", "c1", "c2"]),
        (Policy(weights="same"), []),
        (Policy(weights="newest", newest="13"), []),
        (Policy(weights=1, newest="13"), ["c2"]),
    ],
    ids=[
        "any",
        "newest",
        "one behind",
        "two behind",
        "same",
        "newest is 13",
        "one behind 13",
    ],
)
def test_calls_of_other_weights_are_masked(policy: Policy, expected: list[str]) -> None:
    assert trained(versions("step-10", "step-11", "step-12"), policy) == expected


def test_an_unknown_weight_version_is_not_guessed() -> None:
    assert trained(versions(None, "1"), Policy(weights="newest")) == ["c1"]
    assert trained(versions(None, None), Policy(weights="same")) == []
    assert trained(versions("1", "1"), Policy(weights="same")) == ["c0", "c1"]


def test_versions_that_cannot_be_compared_are_not_guessed() -> None:
    assert trained(versions("warm", "12", "13"), Policy(weights=2, newest="13")) == ["c1", "c2"]
    assert trained(versions("warm", "12"), Policy(weights="newest", newest="warm")) == ["c0"]
    with pytest.raises(ConfigError, match="newest is 'abc', which has no number"):
        Policy(weights=2, newest="abc")


def test_weights_that_changed_during_a_call_count_as_the_older() -> None:
    calls = versions("2", "2")
    calls[0].admitted_version = "1"
    assert trained(calls, Policy(weights="newest")) == ["c1"]
    assert trained(calls, Policy(weights="same")) == []
    (sample,) = made(calls)
    assert sample.weight_versions == ("2", "2")
    assert sample.metadata["admitted_versions"] == ["1", None]


def test_versions_have_an_order() -> None:
    assert in_order(["v10", "v9", "v10"]) == ["v9", "v10"]
    assert in_order(["beta", "alpha"]) == ["beta", "alpha"]
    assert versions_behind("beta", "alpha", ["beta", "alpha"]) == 1
    assert versions_behind("12", "10", []) == 0


@pytest.mark.parametrize("wrong", [{"weights": -1}, {"weights": "old"}, {"unscored": "zero"}])
def test_a_wrong_policy_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Policy(**wrong)  # type: ignore[arg-type]


TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=4)
TREES = st.lists(st.tuples(st.integers(0, 5), TOKENS, TOKENS, st.booleans()), min_size=1, max_size=8)


@given(TREES)
def test_samples_hold_the_exact_tokens_of_their_calls_and_no_call_twice(
    tree: list[tuple[int, list[int], list[int], bool]],
) -> None:
    calls: list[Call] = []
    for index, (parent, added, sampled, drifts) in enumerate(tree):
        before: list[int] = []
        if calls and parent:
            base = calls[parent % len(calls)]
            before = base.prompt_token_ids + ([] if drifts else base.completion_token_ids)
        calls.append(call(index, [*before, *added], sampled))
    seen: list[str] = []
    for sample in made(calls):
        ids = sample.prompt_ids + sample.response_ids
        mask = [0] * len(sample.prompt_ids) + sample.mask
        logprobs = [0.0] * len(sample.prompt_ids) + sample.logprobs
        assert len(sample.mask) == len(sample.response_ids) == len(sample.logprobs)
        assert (sample.mask[0], sample.mask[-1]) == (1, 1)
        covered = [0] * len(ids)
        for name in sample.calls:
            each = next(candidate for candidate in calls if candidate.id == name)
            start, stop = len(each.prompt_token_ids), len(each.prompt_token_ids) + len(each.completion_token_ids)
            assert ids[:stop] == each.prompt_token_ids + each.completion_token_ids
            if mask[start]:
                seen.append(name)
                assert mask[start:stop] == [1] * (stop - start)
                assert logprobs[start:stop] == each.logprobs
                covered[start:stop] = [1] * (stop - start)
        assert covered == mask
    assert sorted(seen) == sorted(each.id for each in calls)
