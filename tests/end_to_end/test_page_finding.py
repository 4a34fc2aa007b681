"""The first page, batches, search, tags and ticked rollouts in a real browser, over a store with three batches."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from paddock.capture.trace import Call
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord

from .pages import a_browser, a_page, paddock
from .test_page import go

pytestmark = pytest.mark.end_to_end

BATCHES, MEMBERS = 3, 4
LONG_ERROR = "the agent wrote nothing for {} s\n" + "  a line of its log\n" * 30


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as started:
        yield started


def make(folder: Path) -> None:
    """Three batches, each better than the one before. In each, one rollout broke; the last has one member left."""
    with Store.open(folder) as store:
        for batch in range(BATCHES):
            for member in range(MEMBERS):
                broke = member == 3
                record = RolloutRecord(
                    f"r-{batch}-{member}", f"task-{member % 2}", model=f"model-{batch % 2}", batch_id=f"b-{batch}",
                    batch_size=MEMBERS + (batch == 2), member=member, weight_version=str(batch),
                    started_at=1_790_000_000.0 + 3600 * batch + member, finished_at=1_790_000_060.0 + 3600 * batch,
                    outcome=Outcome.AGENT if broke else Outcome.OK, reward=None if broke else float(member < batch),
                    error=LONG_ERROR.format(100 + batch) if broke else None, stage="done",
                )  # fmt: skip
                messages = [{"role": "user", "content": f"Look for the needle-{batch} in the haystack."}]
                answer = {"role": "assistant", "content": "It is here." if member else "It is <b>nowhere</b>."}
                store.begin(record)
                store.save_call(record.rollout_id, Call("c0", 0, request={"messages": messages}, message=answer))
                store.finish(record)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("finding")
    make(folder)
    with paddock("view", "--store", str(folder), "--no-open") as address:
        yield address


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with a_page(browser, url, viewport={"width": 1440, "height": 900}, accept_downloads=True) as opened:
        expect(opened.get_by_text("12 rollouts", exact=True)).to_be_visible()
        yield opened


def test_a_point_of_the_chart_shows_its_rollouts(page: Page) -> None:
    chart = page.get_by_role("region", name="Learning")
    chart.get_by_label("Reward by", exact=True).select_option("weights")
    expect(chart.get_by_role("button")).to_have_count(BATCHES)
    chart.get_by_role("button", name="version 2: 0.667").click()
    expect(page.get_by_text("4 rollouts", exact=True)).to_be_visible()
    expect(chart.locator(".point.chosen")).to_have_count(1)
    expect(page.get_by_role("button", name="weight version 2 ×")).to_be_visible()
    page.go_back()
    expect(page.get_by_text("12 rollouts", exact=True)).to_be_visible()
    chart.get_by_label("Lines").select_option("model")
    expect(chart.locator(".series-legend")).to_contain_text("model-1")
    assert "by=weights&split=model" in page.url


def test_success_and_health_are_two_figures(page: Page) -> None:
    figures = page.get_by_role("region", name="Figures")
    expect(figures.locator(".card", has_text="Success")).to_contain_text("3 of 9 with a reward of 1")
    expect(figures.locator(".card", has_text="Health")).to_contain_text("75.0 %")
    expect(figures.locator(".card", has_text="Health")).to_contain_text("9 finished, 3 agent")


def test_transcripts_are_searched_and_filters_are_there_again(page: Page) -> None:
    page.get_by_label("Search", exact=True).fill("needle-1 nowhere")
    row = page.locator(".rollouts .virtual .row")
    expect(row).to_have_count(1)
    expect(row.locator(".match")).to_contain_text("It is <b>nowhere</b>.")
    expect(row.locator("mark")).to_have_text(["needle-1", "nowhere"])
    row.locator(".cell.task").click()
    expect(page.locator(".transcript .item").first).to_be_visible()
    page.keyboard.press("u")
    expect(row).to_have_count(1)
    expect(page.get_by_label("Search", exact=True)).to_have_value("needle-1 nowhere")
    go(page, "#/batches")
    page.get_by_role("link", name="Rollouts", exact=True).click()
    expect(row).to_have_count(1)
    page.get_by_role("link", name="Rollouts", exact=True).click()
    expect(row).to_have_count(12)


def test_any_two_rollouts_are_ticked_and_compared(page: Page) -> None:
    page.get_by_label("Tick r-0-0").check()
    compare = page.get_by_role("button", name="Compare two")
    expect(compare).to_be_disabled()
    page.get_by_label("Tick r-2-1").check()
    compare.click()
    page.wait_for_url("**/#/compare/r-0-0/r-2-1")
    expect(page.locator("main")).to_contain_text("r-2-1")


def test_tags_are_given_shown_and_filtered_by(page: Page) -> None:
    for name in ("r-1-0", "r-1-1"):
        page.get_by_label(f"Tick {name}").check()
    page.get_by_role("button", name="Tags…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Tags", exact=True).fill("-x y")
    dialog.get_by_label("Tags", exact=True).fill("look-again +odd")
    dialog.get_by_role("button", name="Save").click()
    expect(page.locator(".rollouts .virtual .chip")).to_have_count(4)
    page.get_by_label("Any tag").select_option("odd")
    expect(page.get_by_text("2 rollouts", exact=True)).to_be_visible()
    go(page, "#/rollouts/r-1-0")
    expect(page.locator(".rollout-head .chip")).to_have_text(["look-again", "odd"])


def test_filtered_rollouts_are_exported(page: Page, tmp_path: Path) -> None:
    page.get_by_label("Any batch").select_option("b-2")
    expect(page.get_by_text("4 rollouts", exact=True)).to_be_visible()
    page.get_by_role("button", name="Export…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Form").select_option("atif")
    with page.expect_download() as download:
        dialog.get_by_role("button", name="Save as a file").click()
    download.value.save_as(tmp_path / "rollouts.jsonl")
    assert len([json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]) == 3
    expect(dialog).to_have_count(0)


def test_a_batch_shows_its_progress_and_what_broke(page: Page) -> None:
    page.get_by_role("link", name="Batches").click()
    rows = page.locator(".batches tbody tr")
    expect(rows).to_have_count(BATCHES)
    expect(rows.first).to_contain_text("4 of 5")
    rows.first.get_by_role("link").click()
    expect(page.get_by_role("heading", name="Batch b-2")).to_be_visible()
    expect(page.get_by_text("4 done, 0 running, 1 left")).to_be_visible()
    expect(page.locator(".notice")).to_contain_text("--resume b-2")
    expect(page.locator(".rollouts .virtual .row")).to_have_count(4)
    causes = page.get_by_role("region", name="What broke")
    expect(causes.locator("pre")).to_be_hidden()
    causes.get_by_text("the agent wrote nothing for 102 s").first.click()
    expect(causes.locator("pre")).to_contain_text("a line of its log")


def test_the_same_long_error_is_there_once(page: Page) -> None:
    page.get_by_text("What broke (3)").click()
    causes = page.locator(".causes li")
    expect(causes).to_have_count(1)
    causes.get_by_role("link", name="3 ×").click()
    expect(page.get_by_text("3 rollouts", exact=True)).to_be_visible()
    page.get_by_role("button", name="cause: the agent wrote nothing").click()
    expect(page.get_by_role("button", name="cause: ")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_columns_fit_the_screen(browser: Browser, url: str, scheme: str) -> None:
    with a_page(browser, url, viewport={"width": 390, "height": 800}, color_scheme=scheme) as page:
        heads = page.get_by_role("columnheader")
        expect(heads.filter(has_text="Task")).to_be_visible()
        expect(heads.filter(has_text="Model")).to_have_count(0)
        expect(page.get_by_label("Any task")).to_be_hidden()
        page.get_by_role("button", name="Filters").click()
        expect(page.get_by_label("Any task")).to_be_visible()
        for place in ("rollouts?q=needle", "batches", "batches/b-2", "rollouts?by=batch&split=task"):
            go(page, f"#/{place}")
            page.wait_for_load_state("networkidle")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, place
        page.set_viewport_size({"width": 1440, "height": 800})
        go(page, "#/rollouts")
        expect(heads.filter(has_text="Started")).to_be_visible()
        expect(heads.filter(has_text="Batch")).to_be_visible()
        cut = "cells => cells.filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.textContent)"
        assert page.locator(".rollouts .cell").evaluate_all(cut) == []
