"""Whatever is asked, the answer is a clear refusal: a status below 500, a message and a hint."""

import pytest

from .browser import Answer, Browser

IDS = (
    "nope", "..", "..%2F..%2Fetc%2Fpasswd", "%2e%2e%2fstore.db", "%00", "r%00x", "a" * 3000, "%F0%9F%92%A3",
    "'%20OR%201=1--",
    "%ed%a0%80", "<script>", "%3Cscript%3E", "r*", "%25", " ", "_", "....",
)  # fmt: skip
BELOW = ("", "/transcript", "/calls", "/calls/c0", "/calls/c0/tokens", "/changes", "/files?path=x", "/live", "/share")


def refused(answer: Answer) -> None:
    assert answer.status in (400, 404), answer.body
    assert answer.json()["error"]["message"]
    assert answer.json()["error"]["hint"]


@pytest.mark.parametrize("below", BELOW)
def test_no_such_rollout(below: str, browser: Browser) -> None:
    for name in IDS:
        refused(browser.get(f"/web/api/rollouts/{name}{below}"))


WRONG = (
    "rollouts?limit=0", "rollouts?limit=1001", "rollouts?limit=ten", "rollouts?offset=-1", "rollouts?offset=1e3",
    "rollouts?limit=9999999999999999999999", "rollouts?sort=head", "rollouts?sort=reward;drop", "rollouts?order=up",
    "rollouts?min_reward=NaN", "rollouts?max_reward=inf", "rollouts?since=yesterday", "rollouts?outcome=great",
    "rollouts?running=maybe", "rollouts?who=me", "rollouts?q=" + "x" * 600,
    "stats?limit=3", "stats?until=x", "facets?x=1", "groups?limit=-1", "groups?sort=task",
    "compare", "compare?a=x", "compare?b=x", "compare?a=none&b=none", "compare?a=r&b=r&c=r",
    "rollouts?limit=%C2%B2", "rollouts?limit=%D9%A3",
)  # fmt: skip


def test_wrong_parameters_are_named(browser: Browser) -> None:
    for path in WRONG:
        refused(browser.get(f"/web/api/{path}"))


INSIDE = (
    "calls/c99", "calls/..", "calls/%00", "calls/" + "c" * 900, "calls/c0/tokens?part=middle",
    "calls/c0/tokens?limit=0",
    "calls/c0/tokens?offset=-5", "calls/c0/tokens?limit=50001", "transcript?after=-1", "transcript?limit=x",
    "entropy",
    "entropy?call=c99", "files", "files?path=../answer.txt", "files?path=/etc/passwd", "files?path=%00",
    "files?path=answer.txt/x", "live?after=x", "nothing", "calls/c0/nothing", "files?name=x",
)  # fmt: skip


def test_what_a_rollout_does_not_have(browser: Browser, ids: dict[str, str]) -> None:
    for path in INSIDE:
        refused(browser.get(f"/web/api/rollouts/{ids['drift']}/{path}"))


def test_past_the_end_there_is_nothing(browser: Browser, ids: dict[str, str]) -> None:
    name = ids["drift"]
    assert browser.api(f"rollouts/{name}/calls/c0/tokens?offset=100000")["ids"] == []
    assert browser.api(f"rollouts/{name}/calls/c0/tokens?part=prompt&offset=100000")["ids"] == []
    assert browser.api(f"rollouts/{name}/transcript?after=100000")["items"] == []


@pytest.mark.parametrize(
    "path", ["/web/../store.db", "/web/js/../../app.py", "/web/%2e%2e/app.py", "/web/.", "/web/js/"]
)
def test_there_are_no_other_files(path: str, browser: Browser) -> None:
    assert browser.get(path).status == 404


@pytest.mark.parametrize("path", ["about", "rollouts", "stats", "rollouts/x/share"])
def test_only_what_may_be_posted_can_be(path: str, browser: Browser) -> None:
    answer = browser.post(f"/web/api/{path}")
    assert answer.status in (404, 405)
    assert answer.json()["error"]["message"]


def test_an_ended_rollout_cannot_be_stopped(browser: Browser, ids: dict[str, str]) -> None:
    answer = browser.post(f"/web/api/rollouts/{ids['drift']}/abort")
    assert answer.status == 409
    assert "has ended" in answer.json()["error"]["message"]
    assert browser.post("/web/api/rollouts/none/abort").status == 404
