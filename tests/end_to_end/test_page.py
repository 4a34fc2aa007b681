"""The page over recorded rollouts and served environments, driven by clicks and keys in a real browser."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, WebSocket, expect

from paddock.capture.trace import Call, Event
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from recorded import unpack
from train.test_training_view import write

from .pages import TOKEN, a_browser, a_page, paddock, save

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as started:
        yield started


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def ids(recorded: Path) -> dict[str, str]:
    with Store.open(recorded, read_only=True) as store:
        return {record.task_id: record.rollout_id for record in store.list()}


@pytest.fixture(scope="module")
def url(recorded: Path) -> Iterator[str]:
    with paddock("view", "--store", str(recorded), "--no-open") as address:
        yield address


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with a_page(browser, url) as opened:
        yield opened


@pytest.fixture(scope="module")
def counter_url() -> Iterator[str]:
    with paddock("serve", "counter", "--web") as address:
        yield address


@pytest.fixture(scope="module")
def echo_url() -> Iterator[str]:
    with paddock("serve", "echo", "--web") as address:
        yield address


def go(page: Page, place: str) -> None:
    """Change the place and wait until its view has replaced the one before."""
    page.evaluate(
        """place => location.hash === place || new Promise((changed) => {
            addEventListener("hashchange", changed, { once: true });
            location.hash = place;
        })""",
        place,
    )
    expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")


# -- rollouts ---------------------------------------------------------------------------------------


def test_the_token_does_not_stay_in_the_address(page: Page) -> None:
    assert "token" not in page.url


def test_the_table_shows_what_the_store_holds(page: Page, recorded: Path) -> None:
    with Store.open(recorded, read_only=True) as store:
        total = store.count()
    expect(page.get_by_text(f"{total} rollouts")).to_be_visible()
    expect(page.locator(".rollouts .virtual .row").first).to_contain_text("solve")
    expect(page.locator(".figures .card")).to_have_count(6)


def test_a_search_narrows_the_table_and_stays_in_the_address(page: Page) -> None:
    page.keyboard.press("/")
    page.keyboard.type("hostile")
    expect(page.get_by_text("1 rollout", exact=True)).to_be_visible()
    expect(page.locator(".rollouts .virtual .row")).to_have_count(1)
    assert "q=hostile" in page.url
    page.keyboard.press("Escape")
    page.locator("body").click(position={"x": 5, "y": 5})
    page.keyboard.press("x")
    expect(page.locator(".rollouts .virtual .row").nth(5)).to_be_visible()


def test_filters_that_fit_nothing_say_how_to_go_on(page: Page) -> None:
    page.get_by_label("Reward from").fill("7")
    page.get_by_label("Reward from").press("Tab")
    expect(page.get_by_role("heading", name="No rollout fits these filters")).to_be_visible()
    page.get_by_role("button", name="Clear all filters").click()
    expect(page.locator(".rollouts .virtual .row").first).to_be_visible()


def test_a_click_on_a_heading_sorts(page: Page) -> None:
    page.get_by_role("button", name="Reward").click()
    expect(page.get_by_role("columnheader", name="Reward")).to_have_attribute("aria-sort", "descending")
    rewards = page.locator(".rollouts .virtual .row .reward")
    expect(rewards.first).to_have_text("1.0")
    page.get_by_role("button", name="Reward").click()
    expect(page.get_by_role("columnheader", name="Reward")).to_have_attribute("aria-sort", "ascending")
    expect(rewards.first).not_to_have_text("1.0")


def test_keys_choose_and_open_a_rollout(page: Page) -> None:
    expect(page.locator(".rollouts .virtual .row").first).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    expect(page.locator(".row.selected")).to_have_attribute("aria-rowindex", "1")
    page.keyboard.press("Enter")
    expect(page.locator(".transcript .item").first).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Next entry of the transcript")
    page.keyboard.press("Escape")
    page.keyboard.press("u")
    expect(page.locator(".rollouts .virtual .row").first).to_be_visible()


def test_tasks_have_their_figures(page: Page) -> None:
    page.get_by_text("By task").click()
    row = page.locator(".tasks tbody tr").filter(has=page.get_by_role("button", name="wrong", exact=True))
    expect(row).to_contain_text("0.0")
    row.get_by_role("link", name="side by side").click()
    expect(page.get_by_role("heading", name="Groups")).to_be_visible()
    expect(page.locator(".member")).to_have_count(2)


def test_two_of_a_group_are_compared(page: Page, recorded: Path) -> None:
    go(page, "#/groups")
    group = page.locator(".group").filter(has=page.locator(".member").nth(2)).first
    boxes = group.get_by_role("checkbox")
    boxes.nth(0).check()
    boxes.nth(1).check()
    group.get_by_role("button", name="Compare two").click()
    expect(page.get_by_role("heading", name="Where two rollouts part")).to_be_visible()
    expect(page.locator("table.compared th a")).to_have_count(2)


def test_differing_rollouts_show_where_they_differ(page: Page, ids: dict[str, str]) -> None:
    go(page, f"#/compare/{ids['solve']}/{ids['wrong']}")
    expect(page.locator(".token.parted")).to_have_count(2)
    expect(page.get_by_text("then differ in")).to_be_visible()


def test_any_two_rollouts_are_compared_word_by_word(page: Page, ids: dict[str, str]) -> None:
    go(page, "#/compare")
    page.get_by_label("Rollout A").fill(ids["solve"])
    page.get_by_label("Rollout B").fill(ids["wrong"])
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".compared-rows .differs").first).to_be_visible()
    expect(page.locator("mark.word-gone").first).to_be_visible()
    page.keyboard.press("j")
    expect(page.locator(".compared-rows .differs").first).to_be_focused()
    page.get_by_role("link", name="Files", exact=True).click()
    expect(page.locator(".diff-new")).to_be_visible()
    page.set_viewport_size({"width": 390, "height": 800})
    go(page, f"#/compare?a={ids['solve']}&b={ids['wrong']}")
    boxes = [
        page.locator(".differs").filter(has=page.locator("mark")).first.locator("> div").nth(at).bounding_box()
        for at in (0, 1)
    ]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_tree_shows_its_branches_and_compares_two(browser: Browser, tmp_path: Path) -> None:
    def call(index: int, sampled: list[int], text: str, **more: Any) -> Call:
        request = {"messages": [{"role": "user", "content": "Try."}, *({"role": "user", "content": "On."},) * index]}
        texts = {"tokens": [f"<{number}>" for number in sampled], "logprobs": [-0.5] * len(sampled)}
        return Call(
            f"c{index}", index, request=request, prompt_token_ids=[1, *[2] * index], completion_token_ids=sampled,
            message={"role": "assistant", "content": text}, started=1.0, ended=2.0, **texts, **more,
        )  # fmt: skip

    with Store.open(tmp_path) as store:
        first = [call(0, [7], "Look."), call(1, [8], "Solved.")]
        fork = [call(0, [7], "Look.", replayed_from="r-first/c0", is_copy=True), call(1, [9], "Lost.")]
        for name, calls, reward, of in (("r-first", first, 1.0, {}), ("r-fork", fork, 0.0, {"source": "r-first"})):
            record = RolloutRecord(name, "task", fork={**of, "at": 1} if of else {}, call_count=2)
            store.begin(record)
            for each in calls:
                store.save_call(name, each)
                store.add_event(name, Event(1.0, "call", {"call": each.id}))
            record.outcome, record.reward = Outcome.OK, reward
            store.finish(record)
    with paddock("view", "--store", str(tmp_path), "--no-open") as url, a_page(browser, url) as page:
        go(page, "#/rollouts/r-first/tree")
        expect(page.locator(".branches tbody tr")).to_have_count(2)
        expect(page.locator(".branch .leaf")).to_have_count(2)
        expect(page.locator("tbody tr").nth(1)).to_contain_text("from c1")
        for box in page.get_by_role("checkbox").all():
            box.check()
        page.get_by_role("button", name="Compare two").click()
        expect(page.locator(".token.parted")).to_have_text(["<8>", "<9>"])
        expect(page.locator(".compared-row .item")).to_contain_text(["Solved.", "Lost."])
        go(page, "#/rollouts/r-fork/tree")
        expect(page.locator("tr[aria-current]")).to_contain_text("r-fork")


# -- one rollout ------------------------------------------------------------------------------------


def test_a_rollout_on_an_image_shows_where_it_ran(browser: Browser, tmp_path: Path) -> None:
    facts = {
        "phase": "agent",
        "started_at": 1.0,
        "address": None,
        "sent_bytes": 0,
        "received_bytes": 7,
        "seconds": 1.0,
    }
    refused = {**facts, "host": "example.com", "port": 443, "allowed": False, "reason": "not in allowed_hosts"}
    with Store.open(tmp_path) as store:
        record = RolloutRecord("r-on-image", "a-task")
        store.begin(record)
        store.add_event(record.rollout_id, Event(1.0, "warning", {"warning": "task.toml has keys that mean nothing"}))
        record.image = {"name": "debian:12", "digest": "sha256:1", "platform": "linux/arm64"}
        record.user_ids, record.limits, record.build_log = "a range of 9 user ids", {"memory": "measured"}, "step 1"
        record.verifier, record.connections = {"mode": "live", "reason": "sleep was running"}, [refused]
        record.outcome, record.error, record.finished_at = Outcome.TASK, "it needs a GPU (take it out)", 2.0
        store.finish(record)
    with (
        paddock("view", "--store", str(tmp_path), "--no-open") as address,
        a_page(browser, address, viewport={"width": 390, "height": 800}) as page,
    ):
        go(page, "#/rollouts/r-on-image")
        expect(page.locator(".transcript .item").first).to_contain_text("task.toml has keys that mean nothing")
        expect(page.locator(".rollout-title")).to_contain_text("reward –")
        expect(page.locator(".error-text").first).to_have_text("it needs a GPU (take it out)")
        go(page, "#/rollouts/r-on-image/sandbox")
        panel = page.locator(".tab-body")
        shown = ("debian:12", "sha256:1", "linux/arm64", record.user_ids, "live: sleep was running", "measured")
        for text in shown:
            expect(panel).to_contain_text(text)
        expect(panel.locator(".connections tbody tr")).to_contain_text("refused: not in allowed_hosts")
        expect(panel.get_by_text("step 1")).to_be_hidden()
        panel.get_by_text("1 line,").click()
        expect(panel.get_by_text("step 1")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_the_transcript_shows_thoughts_tools_diffs_and_images(page: Page, ids: dict[str, str]) -> None:
    go(page, f"#/rollouts/{ids['image']}")
    expect(page.locator(".item.thought")).to_be_visible()
    expect(page.locator(".item.image img")).to_have_attribute("src", re.compile("^data:image/png;base64,"))
    expect(page.locator(".diff-gone").first).to_contain_text("41")
    expect(page.locator(".diff-new").last).to_contain_text("42")
    expect(page.get_by_text("an image that is not shown").first).to_be_visible()


MARKDOWN = """# Title
Text with **bold**, _soft_, `code`, __init__ and 2 * 3 * 4.

- one
  - [x] two
1. first

| a | b |
|---|--:|
| `x|y` | 2 |

```python
if True:  # why
    return "text"
```

[site](https://example.com/a_(b)) [bad](javascript:alert(1)) ![seen](https://example.com/i.png) <b>tag</b>
"""


def test_markdown_becomes_nodes_and_hostile_text_stays_text(page: Page) -> None:
    made = page.evaluate(
        """async source => {
            const { markdown } = await import("./js/markdown.js");
            const node = markdown(source);
            const tags = [...node.querySelectorAll("*")].map((each) => each.tagName);
            const links = [...node.querySelectorAll("a")].map((each) => [each.getAttribute("href"), each.rel]);
            return { text: node.innerText, html: node.innerHTML, tags, links };
        }""",
        MARKDOWN,
    )
    tags = set(made["tags"])
    assert {"H3", "STRONG", "EM", "CODE", "UL", "OL", "LI", "TABLE", "TH", "TD", "PRE"} <= tags
    assert not tags & {"B", "IMG", "SCRIPT"}
    assert made["links"] == [
        ["https://example.com/a_(b)", "noopener noreferrer nofollow"],
        ["https://example.com/i.png", "noopener noreferrer nofollow"],
    ]
    for text in ("__init__", "2 * 3 * 4", "[bad](javascript:alert(1))", "<b>tag</b>", "☑ two"):
        assert text in made["text"], text
    assert 'class="code-comment"># why' in made["html"]
    took = page.evaluate(
        """async pieces => {
            const { markdown } = await import("./js/markdown.js");
            const start = performance.now();
            for (const piece of pieces) markdown(piece.repeat(5000));
            return performance.now() - start;
        }""",
        ["*a ", "[", "`` ` ", "> ", "- ", "**a_", "|a|\n|-|\n", "![a](", "~~~\n", "http://", "  - a\n"],
    )
    assert took < 20_000


def test_what_an_agent_wrote_is_text_and_does_nothing(browser: Browser, url: str, ids: dict[str, str]) -> None:
    collected: list[str] = []
    with a_page(browser, url) as page:
        page.on("request", lambda request: collected.append(request.url))
        page.on("dialog", lambda dialog: pytest.fail(f"a dialog opened: {dialog.message}"))
        for tab in ("transcript", "tokens", "graph", "files", "verifier", "logs", "config"):
            go(page, f"#/rollouts/{ids['hostile']}/{tab}")
            expect(page.locator(".tab-body > *").first).to_be_visible()
        go(page, f"#/rollouts/{ids['hostile']}")
        expect(page.locator(".item.said-assistant")).to_contain_text("<script>")
        assert page.title() != "owned"
        assert page.locator("main script, main style, main a[href^=javascript], main img").count() == 0
    assert {re.sub(r"^(https?://[^/]+).*", r"\1", each) for each in collected} == {url}


def test_long_outputs_are_folded_and_tools_have_spans(browser: Browser, tmp_path: Path) -> None:
    tool = {"id": "t1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "seq 100"}'}}
    lines = "\n".join(f"line {number}" for number in range(100))
    said = {"role": "assistant", "content": "I **count**.", "tool_calls": [tool]}
    history = [{"role": "user", "content": "Count."}, said, {"role": "tool", "tool_call_id": "t1", "content": lines}]
    with Store.open(tmp_path) as store:
        store.begin(record := RolloutRecord("r-tools", "task", started_at=0.5))
        for index, (start, message) in enumerate(((1.0, said), (7.0, {"role": "assistant", "content": "Done."}))):
            messages = history[: 1 + 2 * index]
            call = Call(
                f"c{index}", index, request={"messages": messages}, message=message, started=start, ended=start + 1
            )
            store.save_call("r-tools", call)
            store.add_event("r-tools", Event(start + 1, "call", {"call": call.id}))
        record.outcome, record.finished_at = Outcome.OK, 9.0
        store.finish(record)
    with paddock("view", "--store", str(tmp_path), "--no-open") as url, a_page(browser, url) as page:
        go(page, "#/rollouts/r-tools")
        result = page.locator(".item.result")
        expect(result).to_contain_text("82 lines hidden")
        expect(result).to_contain_text("line 99")
        expect(result).not_to_contain_text("line 50")
        result.get_by_role("button", name="Show all 100 lines").click()
        expect(result).to_contain_text("line 50")
        expect(page.locator(".said-assistant strong")).to_have_text("count")
        page.keyboard.press("m")
        expect(page.locator(".said-assistant").first).to_contain_text("I **count**.")
        page.keyboard.press("n")
        page.keyboard.press("n")
        expect(page.locator(".item.tool")).to_be_focused()
        expect(page.get_by_role("navigation", name="Outline").get_by_role("button")).to_have_count(4)
        go(page, "#/rollouts/r-tools/timeline")
        page.get_by_role("link", name="bash of c0: 5.0 s. seq 100").click()
        expect(page.locator(".item.tool")).to_be_focused()


def test_the_parts_of_a_rollout_have_places_of_their_own(page: Page, ids: dict[str, str]) -> None:
    go(page, f"#/rollouts/{ids['solve']}")
    for tab, seen in {
        "Timeline": "svg.timeline .phase-agent",
        "Calls": ".graph-box svg .node",
        "Verifier": ".tab-body .panel",
        "Files": ".file-list button",
        "Logs": ".tab-body",
        "Sandbox": ".tab-body table.facts",
        "Configuration": ".tab-body .copyable",
    }.items():
        page.get_by_role("navigation", name="About this rollout").get_by_role("link", name=tab, exact=True).click()
        expect(page.locator(seen).first).to_be_visible()
    expect(page.locator(".copyable code")).to_contain_text("paddock rollout")


def test_the_work_folder_can_be_read(page: Page, ids: dict[str, str]) -> None:
    go(page, f"#/rollouts/{ids['wrong']}/files")
    expect(page.get_by_text("What changed is not known")).to_be_visible()
    expect(page.locator(".diff")).to_have_count(0)
    go(page, f"#/rollouts/{ids['solve']}/files")
    expect(page.get_by_role("heading", name="solve")).to_be_visible()
    page.get_by_role("button", name="answer.txt").click()
    expect(page.locator(".file-shown pre")).to_contain_text("42")


# -- tokens -----------------------------------------------------------------------------------------


def test_a_token_shows_its_alternatives(page: Page, ids: dict[str, str]) -> None:
    go(page, f"#/rollouts/{ids['drift']}/tokens/c1")
    token = page.locator("[aria-label='Sampled tokens'] .token").nth(3)
    token.hover()
    details = page.locator(".token-details")
    expect(details).to_contain_text("Logprob")
    expect(details.locator(".alternatives li").first).to_be_visible()
    expect(details).to_contain_text("1: sampled by the model")
    page.locator("[aria-label='Prompt tokens'] .token").first.hover()
    expect(details).to_contain_text("0: given to the model")


def test_tokens_are_walked_with_the_arrow_keys(page: Page, ids: dict[str, str]) -> None:
    go(page, f"#/rollouts/{ids['drift']}/tokens/c1")
    page.locator("[aria-label='Sampled tokens'] .token").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token-details")).to_contain_text("completion 2")


def test_surprise_is_drawn_and_coloured(page: Page, ids: dict[str, str]) -> None:
    go(page, f"#/rollouts/{ids['drift']}/tokens/c1")
    expect(page.get_by_role("img", name="Entropy of each sampled token of c1")).to_be_visible()
    sampled = page.locator("[aria-label='Sampled tokens'] .token")
    expect(sampled.first).to_be_visible()
    shades = sampled.evaluate_all(
        "tokens => new Set(tokens.map(each => getComputedStyle(each).backgroundColor)).size"
    )
    assert shades > 5
    page.get_by_label("Colour tokens by").select_option("none")
    assert sampled.evaluate_all("all => new Set(all.map(each => getComputedStyle(each).backgroundColor)).size") == 1


@pytest.mark.parametrize(
    ("task", "label"),
    [("compact", "compaction"), ("subagent", "subagent"), ("retry", "retried"), ("branch", "branch")],
)
def test_the_graph_names_what_a_call_was(page: Page, ids: dict[str, str], task: str, label: str) -> None:
    go(page, f"#/rollouts/{ids[task]}/graph")
    expect(page.locator(f".graph-box .call-{label}").first).to_be_visible()
    expect(page.locator(".call-table .row", has_text=label).first).to_be_visible()


def test_drift_is_pointed_out(page: Page, ids: dict[str, str]) -> None:
    go(page, f"#/rollouts/{ids['drift']}/graph")
    expect(page.locator(".drift-ring").first).to_be_visible()
    page.locator(".drift summary").click()
    expect(page.locator(".drift li").first).to_contain_text("first difference at token")


# -- play, server -----------------------------------------------------------------------------------


def test_the_page_of_a_server_opens_with_its_environment(browser: Browser, counter_url: str) -> None:
    with a_page(browser, counter_url) as opened:
        expect(opened.locator("nav [aria-current=page]")).to_have_text("Play")


def test_the_page_of_a_plane_opens_with_its_instances(browser: Browser, tmp_path: Path) -> None:
    options = ("--web", "--state", str(tmp_path / "state"), "--store", str(tmp_path / "store"))
    with paddock("fleet", "up", *options, token_option="--api-key") as address, a_page(browser, address) as opened:
        expect(opened.locator("nav [aria-current=page]")).to_have_text("Fleet")


def test_an_environment_is_played_by_hand(browser: Browser, counter_url: str) -> None:
    with a_page(browser, counter_url) as page:
        go(page, "#/play")
        page.get_by_role("button", name="Reset").click()
        amount = page.get_by_label("amount")
        for number in ("3", "4"):
            amount.fill(number)
            page.get_by_role("button", name="Step").click()
        expect(page.locator(".turn")).to_have_count(3)
        expect(page.locator(".turn").last).to_contain_text('"total": 7')
        expect(page.get_by_role("img", name="Sum of rewards over the steps")).to_be_visible()
        expect(page.locator(".frame.sent").last).to_contain_text('"amount":4')
        amount.fill("-1")
        page.get_by_role("button", name="Step").click()
        expect(page.locator(".field-problem:visible")).to_contain_text("greater than or equal to 0")
        expect(amount).to_have_attribute("aria-invalid", "true")
        expect(page.locator(".turn")).to_have_count(3)


def test_the_python_of_an_episode_plays_it_again(browser: Browser, counter_url: str) -> None:
    with a_page(browser, counter_url) as page:
        go(page, "#/play")
        page.get_by_role("button", name="Reset").click()
        page.get_by_label("amount").fill("6")
        page.get_by_role("button", name="Step").click()
        expect(page.locator(".turn")).to_have_count(2)
        program = page.locator(".copyable code").inner_text()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PADDOCK_AUTH_TOKEN": TOKEN, "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "'total': 6" in done.stdout


def test_requests_made_while_connecting_share_one_session(browser: Browser, counter_url: str) -> None:
    with a_page(browser, counter_url) as page:
        connections: list[WebSocket] = []
        page.on("websocket", lambda connection: connections.append(connection))
        go(page, "#/play")
        page.get_by_label("amount").fill("6")
        page.evaluate("for (const form of document.querySelectorAll('form.panel')) form.requestSubmit()")
        expect(page.locator(".turn")).to_have_count(2)
        expect(page.locator(".turn").last).to_contain_text('"total": 6')
        assert len(connections) == 1


def test_visitors_have_sessions_of_their_own(browser: Browser, counter_url: str) -> None:
    with a_page(browser, counter_url) as first, a_page(browser, counter_url) as second:
        for page, number in ((first, "5"), (second, "1")):
            go(page, "#/play")
            page.get_by_role("button", name="Reset").click()
            page.get_by_label("amount").fill(number)
            page.get_by_role("button", name="Step").click()
        expect(second.locator(".turn").last).to_contain_text('"total": 1')
        expect(first.locator(".turn").last).to_contain_text('"total": 5')
        go(second, "#/server")
        expect(second.get_by_role("heading", name="1 sessions")).to_be_visible()
        expect(second.get_by_role("region", name="Latency")).to_contain_text("step")


def test_tools_have_forms(browser: Browser, echo_url: str) -> None:
    with a_page(browser, echo_url) as page:
        go(page, "#/play")
        page.get_by_role("button", name="Reset").click()
        tool = page.locator("form", has=page.get_by_role("heading", name="echo_message"))
        tool.get_by_label("message").fill("good morning <b>you</b>")
        tool.get_by_role("button", name="Call").click()
        expect(page.locator(".turn").last).to_contain_text("good morning <b>you</b>")


# -- share, looks -----------------------------------------------------------------------------------


def test_a_shared_file_opens_without_a_server(
    browser: Browser, url: str, ids: dict[str, str], tmp_path: Path
) -> None:
    with a_page(browser, url) as page:
        go(page, f"#/rollouts/{ids['hostile']}")
        with page.expect_download() as download:
            page.get_by_role("link", name="Save as one file").click()
        file = save(download.value, tmp_path)
    context = browser.new_context(offline=True)
    alone = context.new_page()
    complaints: list[str] = []
    alone.on("pageerror", lambda error: complaints.append(str(error)))
    alone.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    alone.goto(file.as_uri())
    expect(alone.locator(".item.said-assistant")).to_contain_text("<script>")
    for tab, seen in {
        "Tokens": ".token",
        "Calls": ".node",
        "Timeline": "svg.timeline",
        "Files": ".file-list",
    }.items():
        alone.get_by_role("link", name=tab, exact=True).click()
        expect(alone.locator(seen).first).to_be_visible()
    assert alone.title() != "owned"
    context.close()
    assert complaints == [], complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_narrow_screen(browser: Browser, url: str, ids: dict[str, str], scheme: str) -> None:
    with a_page(browser, url, viewport={"width": 360, "height": 740}, color_scheme=scheme) as page:
        for place in ("rollouts", "groups", f"rollouts/{ids['solve']}", f"rollouts/{ids['solve']}/tokens/c1"):
            go(page, f"#/{place}")
            expect(page.locator("main > .view")).to_be_visible()
            page.wait_for_load_state("networkidle")
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, place


def test_the_first_view_is_small(browser: Browser, url: str) -> None:
    sizes: list[int] = []
    context = browser.new_context()
    page = context.new_page()
    page.on("requestfinished", lambda request: sizes.append(request.sizes()["responseBodySize"]))
    page.goto(f"{url}/web/?token={TOKEN}")
    expect(page.locator(".rollouts .virtual .row").first).to_be_visible()
    context.close()
    assert 0 < sum(sizes) < 200_000


# -- a store that broke -----------------------------------------------------------------------------


def test_a_broken_store_is_reported_once(browser: Browser, tmp_path: Path) -> None:
    folder = unpack(tmp_path)
    with paddock("view", "--store", str(folder), "--no-open") as address:
        (folder / "store.db").write_bytes(b"no database at all" * 1000)
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{address}/web/?token={TOKEN}")
        expect(page.get_by_role("alert")).to_have_count(1)
        expect(page.get_by_role("alert")).to_contain_text("file is not a database")
        expect(page.get_by_role("alert")).to_contain_text("choose another folder")
        for name in (".figures", ".filters", ".rollouts", ".empty"):
            expect(page.locator(name).filter(visible=True)).to_have_count(0)
        go(page, "#/groups")
        expect(page.get_by_role("alert")).to_contain_text("file is not a database")
        expect(page.get_by_role("button", name="Show more groups")).to_have_count(0)
        unpack(tmp_path / "again")
        (tmp_path / "again" / "store.db").replace(folder / "store.db")
        go(page, "#/rollouts")
        expect(page.locator(".figures .card")).to_have_count(6)
        context.close()


# -- training -----------------------------------------------------------------------------------------------------


def test_the_training_view_shows_rewards_by_version(browser: Browser, tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    write(tmp_path).close()
    with paddock("view", "--store", str(tmp_path), "--no-open") as url, a_page(browser, url) as page:
        page.get_by_role("link", name="Training").click()
        expect(page.get_by_role("heading", name="Reward by weight version")).to_be_visible()
        expect(page.get_by_role("region", name="Left out", exact=True)).to_contain_text("unscored: model")
        expect(page.get_by_role("region", name="Tasks")).to_contain_text("task-1")
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
