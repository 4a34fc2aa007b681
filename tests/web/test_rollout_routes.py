"""One rollout in every depth, against the calls that the store reads in full."""

from pathlib import Path
from typing import Any

import pytest

from paddock.capture.trace import Call, Event
from paddock.config import Access
from paddock.rollouts.graph import Graph
from paddock.rollouts.sandboxes import pack_files
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.web.compare import align_items
from paddock.web.mounts import create_view_app
from paddock.web.read_store import ReadStore
from rollouts.played import a_task, needs_bwrap, rolled, shell

from .browser import TOKEN, Browser


def every(store: Store) -> list[str]:
    return [record.rollout_id for record in store.list()]


def transcript(browser: Browser, rollout_id: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = browser.api(f"rollouts/{rollout_id}/transcript?limit=5000")["items"]
    return items


def test_a_rollout_in_full(browser: Browser, store: Store, ids: dict[str, str]) -> None:
    record = store.get(ids["subagent"])
    assert record is not None
    answer = browser.api(f"rollouts/{ids['subagent']}")
    assert answer["instruction"] == record.instruction
    assert answer["config"] == record.config
    logs = {"agent": record.agent_log, "proxy": record.proxy_log, "install": record.install_log}
    logs |= {"build": "", "verifier_build": ""}
    assert answer["logs"] == logs
    assert answer["verifier"]["exit_code"] == 0
    assert [file["path"] for file in answer["files"]] == ["README.md", "answer.txt", "page.txt"]
    assert {file["path"]: file["size"] for file in answer["files"]}["answer.txt"] == 2
    assert answer["live"] is False
    assert answer["has_workdir"] is True
    assert answer["rerun"].startswith("paddock rollout subagent --agent 'command:python3 -c")
    assert [span["name"] for span in answer["timeline"]] == ["install", "sandbox", "setup", "agent", "verifier"]
    for span in answer["timeline"]:
        assert record.started_at - 0.1 <= span["start"] <= span["end"] <= record.finished_at + 0.1


def test_where_a_rollout_ran(tmp_path: Path) -> None:
    connection = {"host": "deb.test", "port": 80, "allowed": False, "phase": "agent", "reason": "not allowed"}
    with Store.open(tmp_path) as store:
        record = RolloutRecord("r-on-image", "a-task")
        store.begin(record)
        record.outcome, record.finished_at, record.build_log = Outcome.OK, 1.0, "step 1"
        record.user_ids = "a range of 65536 user ids"
        record.image, record.limits = {"name": "debian:12", "digest": "sha256:1"}, {"memory": "measured"}
        record.verifier, record.connections = {"mode": "sealed", "reason": "no service"}, [connection]
        record.verifier_image, record.verifier_build_log = {"digest": "sha256:2"}, "step 2"
        record.artifacts = [{"path": "app/out", "size": 3, "source": "/app/out"}]
        record.artifact_blob, record.workdir_blob = (
            store.put_blob(pack_files({"app/out": content})) for content in (b"one", b"two")
        )
        store.finish(record)
    app = create_view_app(ReadStore(tmp_path), Access(token=TOKEN))
    answer = Browser(app).api("rollouts/r-on-image")
    shown = [Browser(app).api(f"rollouts/r-on-image/files?path=app/out{of}")["text"] for of in ("", "&of=artifacts")]
    refused = Browser(app).get("/web/api/rollouts/r-on-image/files?path=app/out&of=nothing").status
    app.state.page.close()
    assert (shown, refused) == (["two", "one"], 400)
    assert (answer["artifacts"], answer["files"]) == (record.artifacts, [{"path": "app/out", "size": 3}])
    assert (answer["verifier"]["image"], answer["logs"]["verifier_build"]) == ({"digest": "sha256:2"}, "step 2")
    assert (answer["image"], answer["limits"]) == (record.image, record.limits)
    assert answer["user_ids"] == "a range of 65536 user ids"
    assert answer["verifier"]["mode"] == "sealed"
    assert (answer["connections"], answer["logs"]["build"]) == ([connection], "step 1")


def test_siblings_are_the_others_of_the_group(browser: Browser, store: Store) -> None:
    [first, *others] = [each.rollout_id for each in store.list(batch_id="b-first", task_id="solve")]
    answer = browser.api(f"rollouts/{first}")["siblings"]
    assert sorted(row["rollout_id"] for row in answer) == sorted(others)


def test_the_beginning_of_an_id_is_enough(browser: Browser, ids: dict[str, str]) -> None:
    name = ids["drift"]
    assert browser.api(f"rollouts/{name[:-3]}")["rollout_id"] == name
    assert "could be" in browser.get(f"/web/api/rollouts/{name[:5]}").json()["error"]["message"]


def test_calls_are_those_of_the_store(browser: Browser, store: Store) -> None:
    for name in every(store):
        rows, calls = browser.api(f"rollouts/{name}/calls")["calls"], store.calls(name)
        nodes = Graph.of(calls).nodes
        assert [row["id"] for row in rows] == [call.id for call in calls]
        for row, call in zip(rows, calls, strict=True):
            node = nodes[call.id]
            assert (row["prompt_tokens"], row["completion_tokens"]) == (
                len(call.prompt_token_ids),
                len(call.completion_token_ids),
            )
            assert (row["trainable"], row["untrainable_because"]) == (call.trainable, call.untrainable_because)
            assert (row["label"], row["parent"], row["shared_tokens"]) == (
                node.label,
                node.parent,
                node.shared_tokens,
            )
            drift = None if node.drift is None else {name: getattr(node.drift, name) for name in row["drift"]}
            assert row["drift"] == drift
            if call.logprobs:
                assert row["mean_logprob"] == pytest.approx(sum(call.logprobs) / len(call.logprobs))


def test_the_recording_has_every_label(browser: Browser, store: Store) -> None:
    labels = {row["label"] for name in every(store) for row in browser.api(f"rollouts/{name}/calls")["calls"]}
    assert labels == {"main", "branch", "subagent", "compaction", "title", "retried", "edited"}


def test_one_call_has_what_was_asked_and_answered(browser: Browser, store: Store, ids: dict[str, str]) -> None:
    for call in store.calls(ids["compact"]):
        answer = browser.api(f"rollouts/{ids['compact']}/calls/{call.id}")
        assert answer["raw_request"] == call.request
        assert answer["request"]["messages"] == call.request["messages"]
        assert answer["message"] == call.message
        assert answer["forwarded"] == call.forwarded
        assert answer["usage"] == call.usage


def test_tokens_are_exact(browser: Browser, store: Store) -> None:
    for name in every(store):
        for call in store.calls(name):
            answer = browser.api(f"rollouts/{name}/calls/{call.id}/tokens?part=completion&limit=50000")
            assert answer["ids"] == call.completion_token_ids
            assert answer["total"] == len(call.completion_token_ids)
            if call.completion_token_ids:
                assert answer["texts"] == call.tokens
                assert answer["logprobs"] == call.logprobs
                assert set(answer["mask"]) == {int(call.trainable)}
            prompt = browser.api(f"rollouts/{name}/calls/{call.id}/tokens?part=prompt&limit=50000")
            assert prompt["ids"] == call.prompt_token_ids
            assert prompt["logprobs"] is None


def test_token_pages_add_up(browser: Browser, store: Store, ids: dict[str, str]) -> None:
    call = store.calls(ids["drift"])[2]
    place = f"rollouts/{ids['drift']}/calls/{call.id}/tokens?part=prompt"
    pages = [browser.api(f"{place}&offset={offset}&limit=100") for offset in range(0, 600, 100)]
    assert [token for page in pages for token in page["ids"]] == call.prompt_token_ids
    assert [len(page["mask"]) for page in pages] == [len(page["ids"]) for page in pages]


def test_prompts_show_what_was_sampled_before(browser: Browser, store: Store, ids: dict[str, str]) -> None:
    name = ids["wrong"]
    first, second = store.calls(name)
    answer = browser.api(f"rollouts/{name}/calls/{second.id}/tokens?part=prompt&limit=50000")
    start, end = len(first.prompt_token_ids), len(first.prompt_token_ids) + len(first.completion_token_ids)
    assert answer["shared"] == end
    assert answer["mask"] == [int(start <= at < end) for at in range(len(second.prompt_token_ids))]
    assert answer["texts"][start:end] == first.tokens


def test_entropy_is_known_where_alternatives_are(browser: Browser, ids: dict[str, str]) -> None:
    answer = browser.api(f"rollouts/{ids['drift']}/calls/c0/tokens")
    assert all(value > 0 for value in answer["entropy"])
    assert answer["top"][0][0][0] == answer["texts"][0]
    curve = browser.api(f"rollouts/{ids['drift']}/entropy?call=c0")
    assert curve["what"] == "entropy"
    assert [point["mean"] for point in curve["points"]] == pytest.approx(answer["entropy"])
    other = browser.api(f"rollouts/{ids['branch']}/entropy?call=c0")
    assert other["what"] == "surprise"
    assert browser.api(f"rollouts/{ids['branch']}/calls/c0/tokens")["entropy"] is None


# -- the transcript -------------------------------------------------------------------------------


def test_transcripts_come_in_pages(browser: Browser, ids: dict[str, str]) -> None:
    whole = transcript(browser, ids["compact"])
    first = browser.api(f"rollouts/{ids['compact']}/transcript?limit=10")
    second = browser.api(f"rollouts/{ids['compact']}/transcript?limit=500&after={first['next']}")
    assert not first["done"]
    assert second["done"]
    assert first["items"] + second["items"] == whole
    assert [item["seq"] for item in whole] == [*range(len(whole))]


def test_each_message_is_sent_once(browser: Browser, ids: dict[str, str]) -> None:
    items = [
        item for item in transcript(browser, ids["retry"]) if item["kind"] != "note" and item["label"] != "retried"
    ]
    assert [(item["kind"], item["role"]) for item in items] == [
        ("thinking", "assistant"), ("tool_call", "assistant"),
        ("tool_result", "tool"), ("tool_call", "assistant"),
        ("tool_result", "tool"), ("tool_call", "assistant"),
        ("tool_result", "tool"), ("message", "assistant"),
    ]  # fmt: skip
    assert all(item.get("sampled", False) == (item["role"] == "assistant") for item in items)


def test_results_know_their_calls(browser: Browser, ids: dict[str, str]) -> None:
    items = transcript(browser, ids["wrong"])
    [call] = [item for item in items if item["kind"] == "tool_call"]
    [result] = [item for item in items if item["kind"] == "tool_result"]
    assert (call["name"], call["arguments"]) == ("write", {"content": "7", "filePath": "answer.txt"})
    assert call["changes"][0] == {"path": "answer.txt", "before": None, "after": "7"}
    assert (result["id"], result["name"], result["text"]) == (call["id"], "write", "written")


def test_an_edit_shows_both_sides(browser: Browser, ids: dict[str, str]) -> None:
    changes = [change for item in transcript(browser, ids["image"]) for change in item.get("changes", ())]
    assert changes[1] == {"path": "answer.txt", "before": "41", "after": "42"}


def test_side_calls_are_labelled(browser: Browser, ids: dict[str, str]) -> None:
    items = transcript(browser, ids["subagent"])
    assert {item["label"] for item in items if item["call"]} == {"title", "agent", "subagent"}
    assert [item["text"] for item in items if item["label"] == "subagent" and item["role"] == "user"] == [
        "Find out what a haiku is: write a haiku."
    ]


def test_an_answer_that_came_back_changed_is_shown(browser: Browser, ids: dict[str, str]) -> None:
    edited = [item for item in transcript(browser, ids["drift"]) if item.get("edited")]
    assert " (as I remember it)" in [item.get("text") for item in edited]
    assert not [item for item in transcript(browser, ids["branch"]) if item.get("edited")]


def test_retries_and_failures_are_noted(browser: Browser, ids: dict[str, str]) -> None:
    notes = {item["note"]: item["text"] for item in transcript(browser, ids["retry"]) if item["kind"] == "note"}
    assert "asked again after" in notes["retry"]
    notes = {item["note"]: item["text"] for item in transcript(browser, ids["unlucky"]) if item["kind"] == "note"}
    assert "scripted fault" in notes["error"]
    assert notes["outcome"] == "outcome: model"


def test_only_raster_images_are_images(browser: Browser, ids: dict[str, str]) -> None:
    items = transcript(browser, ids["image"])
    assert [item["mime"] for item in items if item["kind"] == "image"] == ["image/png"]
    hidden = [item["text"] for item in items if item["kind"] == "note" and "not shown" in item["text"]]
    assert len(hidden) == 2
    assert "svg" in hidden[0]


def test_a_hostile_text_is_sent_unchanged(browser: Browser, ids: dict[str, str]) -> None:
    items = transcript(browser, ids["hostile"])
    assert any("<script>" in item.get("text", "") and item["kind"] == "tool_result" for item in items)
    assert any("<script>" in item.get("text", "") and item.get("sampled") for item in items)


def test_a_rollout_without_calls_has_a_transcript(browser: Browser, store: Store) -> None:
    [record] = store.list(outcome="agent")
    items = transcript(browser, record.rollout_id)
    assert {item["kind"] for item in items} == {"note"}
    assert browser.api(f"rollouts/{record.rollout_id}/calls") == {"calls": []}


# -- files ----------------------------------------------------------------------------------------


def test_files_are_read_from_the_sealed_folder(browser: Browser, ids: dict[str, str]) -> None:
    answer = browser.api(f"rollouts/{ids['wrong']}/files?path=answer.txt")
    assert answer == {"path": "answer.txt", "text": "7", "base64": None, "size": 1, "truncated": False}
    changes = browser.api(f"rollouts/{ids['wrong']}/changes")
    assert {change["path"]: change["after"] for change in changes}["answer.txt"] == "7"
    assert {change["kind"] for change in changes} == {"present"}


@needs_bwrap
def test_changes_are_shown_against_the_files_of_any_task(tmp_path: Path) -> None:
    files = {name: f"{name}\n".encode() for name in ("kept.txt", "edited.txt", "lost.txt", "below/kept.txt")}
    agent = shell("echo more >> edited.txt; rm lost.txt; echo 42 > answer.txt")
    with Store.open(tmp_path) as store:
        first, second = (rolled(store, agent, task=a_task(files=files)) for _ in range(2))
        bare = rolled(store, agent, task=a_task(id="bare"))
    assert first.task_blob == second.task_blob
    app = create_view_app(ReadStore(tmp_path), Access(token=TOKEN))
    visitor = Browser(app)
    kinds = {each["path"]: each["kind"] for each in visitor.api(f"rollouts/{first.rollout_id}/changes")}
    assert kinds == {"answer.txt": "added", "edited.txt": "changed", "lost.txt": "removed"}
    kinds = {each["path"]: each["kind"] for each in visitor.api(f"rollouts/{bare.rollout_id}/changes")}
    assert kinds == {"answer.txt": "added", "edited.txt": "added"}
    app.state.page.close()


def test_the_tree_has_parents_branch_points_and_rewards(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        for name, source, reward in (("r-one", None, 1.0), ("r-two", "r-one", 0.25), ("r-three", "r-two", None)):
            fork = {"source": source, "at": 1} if source else {}
            record = RolloutRecord(name, "task", outcome=Outcome.OK, reward=reward, fork=fork)
            store.begin(record)
            store.finish(record)
        store.delete(["r-two"])
    app = create_view_app(ReadStore(tmp_path), Access(token=TOKEN))
    tree = Browser(app).api("rollouts/r-three/tree")["branches"]
    app.state.page.close()
    assert [(each["rollout_id"], each["parent"], each["at"]) for each in tree] == [
        ("r-one", None, None),
        ("r-two", "r-one", 1),
        ("r-three", "r-two", 1),
    ]
    assert [(each["reward"], each["is_pruned"]) for each in tree] == [(1.0, False), (None, True), (None, False)]


# -- two rollouts ---------------------------------------------------------------------------------


def test_a_rollout_is_like_itself(browser: Browser, ids: dict[str, str]) -> None:
    answer = browser.api(f"compare?a={ids['wrong']}&b={ids['wrong']}")
    assert answer["first"] is None
    assert answer["messages"] is None
    assert answer["same_prompt_tokens"] > 100


def test_the_first_difference_is_found(browser: Browser, store: Store, ids: dict[str, str]) -> None:
    a, b = store.calls(ids["wrong"])[0], store.calls(ids["branch"])[0]
    answer = browser.api(f"compare?a={ids['wrong']}&b={ids['branch']}")
    pairs = zip(a.prompt_token_ids, b.prompt_token_ids, strict=False)
    place = next(at for at, (one, other) in enumerate(pairs) if one != other)
    assert answer["first"]["where"] == "prompt"
    assert answer["first"]["offset"] == place == answer["same_prompt_tokens"]
    assert answer["first"]["a"]["piece"]["id"] == a.prompt_token_ids[place]
    assert answer["first"]["b"]["piece"]["id"] == b.prompt_token_ids[place]
    assert [piece["id"] for piece in answer["first"]["a"]["before"]] == a.prompt_token_ids[place - 24 : place]
    first = next(row for row in answer["messages"]["rows"] if row["kind"] == "differs")
    assert first["a"]["text"] != first["b"]["text"]


def test_of_two_that_go_on_alike_one_may_be_longer(browser: Browser, store: Store) -> None:
    [short] = store.list(outcome="budget")
    longer = store.list(batch_id="b-first", task_id="solve")[0]
    answer = browser.api(f"compare?a={short.rollout_id}&b={longer.rollout_id}")
    assert answer["first"]["where"] in ("prompt", "completion")
    assert answer["calls"] == {"a": 2, "b": 4}


def test_messages_of_one_kind_stand_next_to_each_other(browser: Browser, ids: dict[str, str]) -> None:
    a, b = ids["solve"], ids["wrong"]
    rows = browser.api(f"compare?a={a}&b={b}")["messages"]["rows"]
    for row in rows:
        if row["kind"] == "same":
            assert row["count"] > 0
        elif row["a"] is not None and row["b"] is not None:
            assert (row["a"]["kind"], row["a"].get("name")) == (row["b"]["kind"], row["b"].get("name"))
    for side, rollout_id in (("a", a), ("b", b)):
        items = browser.api(f"rollouts/{rollout_id}/transcript")["items"]
        shown = sum(1 for row in rows if row.get(side)) + sum(row["count"] for row in rows if row["kind"] == "same")
        assert shown == sum(item["kind"] != "note" for item in items)


def test_sampled_tokens_that_differ_stand_behind_the_prompt(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        for name, sampled in (("r-a", [5, 6]), ("r-b", [5, 7])):
            store.begin(record := RolloutRecord(name, "task"))
            call = Call("c0", 0, prompt_token_ids=[1, 2], completion_token_ids=sampled, message={"content": "x"})
            store.save_call(name, call)
            store.add_event(name, Event(1.0, "call", {"call": "c0"}))
            record.outcome = Outcome.OK
            store.finish(record)
    app = create_view_app(ReadStore(tmp_path), Access(token=TOKEN))
    first = Browser(app).api("compare?a=r-a&b=r-b")["first"]
    app.state.page.close()
    assert (first["where"], first["offset"], first["shared_tokens"]) == ("completion", 1, 3)
    assert [piece["id"] for piece in first["b"]["before"]] == [1, 2, 5]
    assert (first["a"]["piece"]["id"], first["b"]["piece"]["id"]) == (6, 7)


def test_long_transcripts_are_not_aligned() -> None:
    a, b = [b"x", *(b"a%d" % each for each in range(2000)), b"y"], [b"x", b"b", b"y"]
    assert list(align_items(a, b)) == [
        (True, (0, 1), (0, 1)),
        (False, (1, 2001), (1, 2)),
        (True, (2001, 2002), (2, 3)),
    ]


def test_files_of_two_rollouts_are_compared(browser: Browser, ids: dict[str, str]) -> None:
    answer = browser.api(f"compare/files?a={ids['solve']}&b={ids['wrong']}")
    assert [change["path"] for change in answer["changes"]] == ["answer.txt"]
    assert browser.api(f"compare/files?a={ids['solve']}&b={ids['solve']}")["changes"] == []
