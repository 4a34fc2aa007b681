"""Forks in exports: what branches share is trained on once, and a tree has it once."""

import io
import json
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.rollouts import END, call, conversation, record, save
from paddock.capture.trace import Call
from paddock.errors import ConfigError
from paddock.export import FORMS, load_form
from paddock.export.policy import Policy
from paddock.export.stream import check, check_trees, export, export_trees, select_keys
from paddock.export.trees import find_tree_problems
from paddock.store import Store

FLAG = Policy(unscored="flag")


def fork_of(source: str, calls: list[Call], at: int, mark: int, *, new: int = 2) -> list[Call]:
    """Calls of a fork whose own completions begin with `mark`."""
    repeated = deepcopy(calls[:at])
    for each in repeated:
        each.replayed_from, each.is_copy = each.replayed_from or f"{source}/{each.id}", True
    prompt = list(calls[at].prompt_token_ids) if at < len(calls) else [5, 5, mark]
    own = []
    for index in range(at, at + new):
        sampled = [mark, 300 + index, END]
        own.append(call(index, list(prompt), sampled))
        prompt += [*sampled, 70 + index]
    return [*repeated, *own]


def add_fork(store: Store, name: str, source: str, at: int, mark: int, reward: float | None = 1.0) -> None:
    calls = fork_of(source, store.calls(source), at, mark)
    save(store, record(name, reward, fork={"source": source, "at": at}, started_at=float(mark)), calls)


@pytest.fixture
def family(tmp_path: Path) -> Any:
    """`one` with reward 0; forks of it at its call 1 with rewards 1 and 0; a fork of the first of them at call 2."""
    with Store.open(tmp_path / "store") as store:
        save(store, record("one", 0.0, started_at=1.0), conversation(3))
        add_fork(store, "two", "one", 1, 1002, 1.0)
        add_fork(store, "three", "one", 1, 1003, 0.0)
        add_fork(store, "four", "two", 2, 1004, 0.5)
        yield store


def lines(store: Store, form: str, **options: Any) -> list[dict[str, Any]]:
    out = io.BytesIO()
    export(store, form, out, **options)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def trees(store: Store, **options: Any) -> list[dict[str, Any]]:
    out = io.BytesIO()
    export_trees(store, "jsonl", out, **options)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def trained_tokens(documents: list[dict[str, Any]]) -> int:
    return sum(sum(each["loss_mask"]) for each in documents)


def test_the_source_trains_on_what_its_forks_repeat(family: Store) -> None:
    trained = [(each["rollout_id"], each["call"]) for each in lines(family, "jsonl")]
    assert trained == [
        *(("one", "c0"), ("one", "c1"), ("one", "c2")),
        *(("two", "c1"), ("two", "c2"), ("three", "c1"), ("three", "c2"), ("four", "c2"), ("four", "c3")),
    ]


def test_each_branch_is_a_complete_sequence(family: Store) -> None:
    for each in lines(family, "slime"):
        whole = family.calls(each["rollout_id"])[-1]
        assert each["tokens"] == whole.prompt_token_ids + whole.completion_token_ids


def test_without_its_source_the_first_fork_trains_on_the_prefix(family: Store) -> None:
    keys = select_keys(family, ["three", "four", "two"])
    trained = [(each["rollout_id"], each["call"]) for each in lines(family, "jsonl", keys=keys)]
    assert trained[:3] == [("three", "c0"), ("three", "c1"), ("three", "c2")]
    assert trained[3:] == [("four", "c1"), ("four", "c2"), ("four", "c3"), ("two", "c2")]


def test_an_unscored_source_leaves_the_prefix_to_its_fork(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        save(store, record("one", None, reward_reason="it hung", started_at=1.0), conversation(3))
        add_fork(store, "two", "one", 2, 1002)
        assert [each["call"] for each in lines(store, "jsonl")] == ["c0", "c1", "c2", "c3"]
        assert [each["call"] for each in lines(store, "jsonl", policy=FLAG)] == ["c0", "c1", "c2", "c2", "c3"]
        (tree,) = trees(store)
        assert [each["rollout_id"] for each in tree["rollouts"]] == ["two"]


def test_a_pruned_source_leaves_the_prefix_to_its_fork(family: Store) -> None:
    family.delete(["one"])
    trained = [(each["rollout_id"], each["call"]) for each in lines(family, "jsonl")]
    assert trained[0] == ("two", "c0")
    (tree,) = trees(family)
    assert (tree["tree_id"], len(tree["rollouts"])) == ("one", 3)


def test_a_repeated_request_is_trained_on_once(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        save(store, record("one", 1.0, started_at=1.0), conversation(2))
        calls = fork_of("one", store.calls("one"), 1, 1002)
        again = deepcopy(calls[0])
        again.id, again.index = "c9", 9
        save(store, record("two", 1.0, fork={"source": "one", "at": 1}, started_at=2.0), [*calls, again])
        keys = select_keys(store, ["two"])
        assert [each["call"] for each in lines(store, "jsonl", keys=keys)] == ["c0", "c1", "c2"]


def test_a_tree_has_each_token_once(family: Store) -> None:
    (tree,) = trees(family)
    assert (tree["tree_id"], [each["parent"] for each in tree["rollouts"]]) == ("one", [None, "one", "one", "two"])
    sampled = {each["call"]: each for each in tree["nodes"] if "call" in each}
    assert list(sampled["one/c0"]["rollout_ids"]) == ["one", "two", "three", "four"]
    assert len(sampled) == 3 + 2 + 2 + 2
    assert list(find_tree_problems(tree)) == []
    assert check_trees(family, "jsonl").wrong == 0


def test_a_branch_is_compared_with_its_branch_point(family: Store) -> None:
    (tree,) = trees(family)
    nodes = {each["call"]: each for each in tree["nodes"] if "call" in each}
    mean = (0.0 + 1.0 + 0.0 + 0.5) / 4
    assert (nodes["one/c0"]["value"], nodes["one/c0"]["advantage"]) == (mean, 0.0)
    assert nodes["one/c1"]["advantage"] == nodes["one/c2"]["advantage"] == 0.0 - mean
    assert nodes["two/c1"]["advantage"] == (1.0 + 0.5) / 2 - mean
    assert nodes["two/c2"]["advantage"] == 1.0 - 0.75
    assert nodes["four/c3"]["advantage"] == 0.5 - 0.75


def test_every_path_of_a_tree_is_a_rollout(family: Store) -> None:
    (tree,) = trees(family)
    paths = set()
    for node in tree["nodes"]:
        tokens, current = list(node["tokens"]), node
        while current["parent"] is not None:
            current = tree["nodes"][current["parent"]]
            tokens = [*current["tokens"], *tokens]
        paths.add(tuple(tokens))
    for name in ("one", "two", "three", "four"):
        last = family.calls(name)[-1]
        assert (*last.prompt_token_ids, *last.completion_token_ids) in paths


@pytest.mark.parametrize("form", sorted(name for name in FORMS if load_form(name).export_tree is None))
def test_a_form_without_trees_is_refused_with_a_hint(family: Store, form: str) -> None:
    with pytest.raises(ConfigError, match="no form for trees") as refused:
        export_trees(family, form, io.BytesIO())
    assert "--to jsonl" in str(refused.value.hint)


FORKS = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.integers(0, 4),
        st.sampled_from([0.0, 0.5, 1.0, None]),
        st.booleans(),
        st.booleans(),
    ),
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1.0, None]), FORKS, st.permutations(range(7)), st.integers(1, 7))
def test_every_sampled_token_is_trained_on_exactly_once(
    tmp_path_factory: Any, reward: float | None, forks: list[Any], order: list[int], count: int
) -> None:
    with Store.open(tmp_path_factory.mktemp("store")) as store:
        save(store, record("r-0", reward, started_at=0.0), conversation(3))
        sampled = {"r-0": [("r-0/c0"), ("r-0/c1"), ("r-0/c2")]}
        for number, (parent, at, scored, is_edited, is_resumed) in enumerate(forks, 1):
            source = f"r-{parent % number}"
            calls = fork_of(source, store.calls(source), at := min(at, len(store.calls(source))), 2000 + number)
            if is_edited:
                calls[at].completion_token_ids, calls[at].logprobs = [], []
                calls[at].token_problem = "its answer was written by hand"
            fork = {"source": source, "at": None if is_resumed else at}
            save(store, record(f"r-{number}", scored, fork=fork, started_at=float(number)), calls)
            own = [each for each in calls if each.token_problem is None]
            sampled[f"r-{number}"] = [each.replayed_from or f"r-{number}/{each.id}" for each in own]
        names = [f"r-{number}" for number in order if number <= len(forks)][:count]
        rewards = {name: about.reward for name in names if (about := store.get(name)) is not None}
        expected = {each for name in names if rewards[name] is not None for each in sampled[name]}
        keys = select_keys(store, names)
        documents = lines(store, "jsonl", keys=keys)
        texts = Counter(tuple(each["completion_token_ids"]) for each in documents)
        assert set(texts.values()) <= {1}
        assert len(documents) == len(expected)
        assert trained_tokens(documents) == 3 * len(expected)
        masks = [mask for each in lines(store, "slime", keys=keys) for mask in each["loss_mask"]]
        assert sum(masks) == 3 * len(expected)
        in_trees = [sum(node["mask"]) for each in trees(store, keys=keys) for node in each["nodes"]]
        assert sum(in_trees) == 3 * len(expected)
        assert check(store, "jsonl", keys=keys).wrong == check_trees(store, "jsonl", keys=keys).wrong == 0
