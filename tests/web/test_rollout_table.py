"""The table, its figures and its groups, against what the store says rollout by rollout."""

from collections import Counter
from statistics import fmean
from typing import Any

import pytest

from paddock.rollouts.rollout_json import summarize
from paddock.store import Store

from .browser import Browser


def summaries(store: Store) -> list[dict[str, Any]]:
    return [{**summarize(record), "tags": store.tags(record.rollout_id)} for record in store.list()]


def test_about_lists_what_there_is(browser: Browser) -> None:
    about = browser.api("about")
    assert about["parts"] == {"rollouts": True, "play": False, "server": False, "fleet": False, "training": False}
    assert about["environment"] is None
    assert about["can_abort"] is True


def test_the_table_shows_the_newest_first(browser: Browser, store: Store) -> None:
    answer = browser.api("rollouts")
    assert answer["total"] == store.count() == len(answer["rows"])
    assert answer["rows"] == summaries(store)


def test_pages_add_up_to_the_table(browser: Browser, store: Store) -> None:
    pages = [browser.api(f"rollouts?limit=7&offset={offset}") for offset in (0, 7, 14)]
    assert [page["offset"] for page in pages] == [0, 7, 14]
    assert [row for page in pages for row in page["rows"]] == summaries(store)
    assert browser.api("rollouts?offset=5000")["rows"] == []


CONDITIONS = {
    "task=solve": lambda row: row["task_id"] == "solve",
    "agent=command": lambda row: row["agent"] == "command",
    "model=plain": lambda row: row["model"] == "plain",
    "batch=b-first": lambda row: row["batch_id"] == "b-first",
    "outcome=timeout&outcome=model": lambda row: row["outcome"] in ("timeout", "model"),
    "min_reward=0.5": lambda row: row["reward"] is not None and row["reward"] >= 0.5,
    "max_reward=0.75&min_reward=0.1": lambda row: row["reward"] == 0.75,
    "running=1": lambda row: row["outcome"] is None,
    "running=0": lambda row: row["outcome"] is not None,
    "outcome=running": lambda row: row["outcome"] is None,
    "q=BUDGET+used": lambda row: "budget of calls was used up" in (row["error"] or ""),
    "q=b-first": lambda row: row["batch_id"] == "b-first",
    "task=solve&outcome=ok&q=replay": lambda row: (
        (row["task_id"], row["outcome"], row["model"]) == ("solve", "ok", "replay")
    ),
    "task=": lambda row: True,
}


@pytest.mark.parametrize("query", CONDITIONS)
def test_the_table_is_filtered(query: str, browser: Browser, store: Store) -> None:
    expected = [row for row in summaries(store) if CONDITIONS[query](row)]
    answer = browser.api(f"rollouts?{query}")
    assert [{**row, "match": None} for row in answer["rows"]] == [{**row, "match": None} for row in expected]
    assert answer["total"] == len(expected)
    assert browser.api(f"stats?{query}")["total"] == len(expected)


def test_the_table_is_filtered_by_time(browser: Browser, store: Store) -> None:
    middle = summaries(store)[9]["started_at"]
    assert browser.api(f"rollouts?since={middle}")["total"] == 10
    assert browser.api(f"rollouts?until={middle}")["total"] == store.count() - 9


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize(
    ("sort", "name"),
    [("started", "started_at"), ("reward", "reward"), ("wall", "wall_s"), ("calls", "calls"), ("task", "task_id")],
)
def test_the_table_is_sorted_and_the_unknown_come_last(sort: str, name: str, order: str, browser: Browser) -> None:
    values = [row[name] for row in browser.api(f"rollouts?sort={sort}&order={order}")["rows"]]
    present = [value for value in values if value is not None]
    assert present == sorted(present, reverse=order == "desc")
    assert values == present + [None] * (len(values) - len(present))


def test_the_table_is_sorted_by_tokens(browser: Browser) -> None:
    rows = browser.api("rollouts?sort=tokens")["rows"]
    tokens = [row["prompt_tokens"] + row["completion_tokens"] for row in rows]
    assert tokens == sorted(tokens, reverse=True)


def test_facets_count_what_there_is(browser: Browser, store: Store) -> None:
    answer, rows = browser.api("facets"), summaries(store)
    for facet, name in (("tasks", "task_id"), ("models", "model"), ("outcomes", "outcome"), ("batches", "batch_id")):
        assert {each["name"]: each["count"] for each in answer[facet]} == Counter(row[name] for row in rows)
        counts = [each["count"] for each in answer[facet]]
        assert counts == sorted(counts, reverse=True)


def test_stats_add_up(browser: Browser, store: Store) -> None:
    answer, rows = browser.api("stats"), summaries(store)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    assert answer["scored"] == len(rewards)
    assert answer["mean_reward"] == pytest.approx(fmean(rewards))
    assert answer["outcomes"] == Counter(row["outcome"] for row in rows)
    assert answer["prompt_tokens"] == sum(row["prompt_tokens"] for row in rows)
    assert answer["wall"]["mean"] == pytest.approx(fmean(row["wall_s"] for row in rows))
    assert answer["wall"]["p50"] in [row["wall_s"] for row in rows]
    assert answer["ci"][0] < answer["mean_reward"] < answer["ci"][1]
    assert sum(task["count"] for task in answer["tasks"]) == len(rows)
    [solve] = [task for task in answer["tasks"] if task["task_id"] == "solve"]
    own = [row["reward"] for row in reversed(rows) if row["task_id"] == "solve" and row["reward"] is not None]
    assert solve["rewards"] == own
    passed = sum(reward >= 1 for reward in own)
    assert solve["pass"]["1"] == pytest.approx(passed / len(own))
    assert solve["pass"]["8"] is None


def test_stats_of_a_filter_have_its_quantiles(browser: Browser, store: Store) -> None:
    walls = sorted(row["wall_s"] for row in summaries(store) if row["task_id"] == "solve")
    assert browser.api("stats?task=solve")["wall"]["p95"] == walls[int(0.95 * len(walls))]


def test_stats_of_nothing_are_empty(browser: Browser) -> None:
    answer = browser.api("stats?task=no-such-task")
    assert (answer["total"], answer["mean_reward"], answer["ci"], answer["tasks"]) == (0, None, None, [])
    assert answer["wall"] == {"mean": None, "p50": None, "p95": None}


def test_groups_hold_their_members(browser: Browser, store: Store) -> None:
    answer = browser.api("groups?batch=b-first")
    assert answer["total"] == 2
    groups = {group["task_id"]: group for group in answer["groups"]}
    assert set(groups) == {"solve", "wrong"}
    assert (groups["solve"]["count"], groups["solve"]["mean"]) == (3, 1.0)
    assert [row["rollout_id"] for row in groups["wrong"]["members"]] == [
        row["rollout_id"]
        for row in reversed(summaries(store))
        if (row["task_id"], row["batch_id"]) == ("wrong", "b-first")
    ]
    assert len(browser.api("groups?limit=3&offset=1")["groups"]) == 3


def test_answers_are_compressed_for_those_who_ask(browser: Browser) -> None:
    plain = browser.get("/web/api/rollouts")
    squeezed = browser.get("/web/api/rollouts", accept_encoding="gzip, br")
    assert squeezed.headers["content-encoding"] == "gzip"
    assert len(squeezed.body) < len(plain.body) / 3
    assert squeezed.json() == plain.json()
