"""Every call keeps the weights it was sampled from: told by the engine, or said by the trainer."""

from typing import Any

import pytest

from capture.harness import run, start_proxy
from capture.scripted_model import ScriptedModel, ok
from paddock.capture.completion import Completion
from paddock.capture.trace import Call
from paddock.models.weight_version import Weights


def test_a_version_is_set_or_asked_for() -> None:
    weights = Weights(3)
    assert weights.current() == "3"
    weights.set("step-4")
    assert weights.current() == "step-4"
    step = 7
    request = Weights(lambda: step)
    assert request.current() == "7"
    assert Weights.of(request) is request
    assert Weights.of(None).current() is None


def call_of_versions(*, first: str | None, last: str | None, admitted: str | None, reported: str | None) -> Call:
    """A call whose engine told two versions, and whose trainer said one at the start and one at the end."""
    answer, call = Completion(strip=True), Call("c0", 0, admitted_version=admitted)
    answer.read({"choices": [], **({"weight_version": first} if first else {})})
    answer.read({"choices": [], **({"metadata": {"weight_version": last}} if last else {})})
    answer.set_weight_version(reported, from_engine=False)
    answer.copy_to(call)
    return call


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"first": "5", "last": "5", "admitted": None, "reported": None}, (None, "5")),
        ({"first": "5", "last": "6", "admitted": None, "reported": None}, ("5", "6")),
        ({"first": None, "last": None, "admitted": "8", "reported": "9"}, ("8", "9")),
        ({"first": "5", "last": "5", "admitted": "4", "reported": "9"}, (None, "5")),
        ({"first": None, "last": None, "admitted": None, "reported": None}, (None, None)),
    ],
    ids=["engine", "engine, changed", "trainer, changed", "both", "nobody"],
)
def test_both_versions_of_a_call_are_kept(
    versions: dict[str, str | None], expected: tuple[str | None, str | None]
) -> None:
    call = call_of_versions(**versions)
    assert (call.admitted_version, call.weight_version) == expected


def test_a_call_keeps_what_the_trainer_says_at_its_beginning_and_at_its_end() -> None:
    weights = Weights("1")

    async def step(server: ScriptedModel, request: Any, request_body: dict[str, Any]) -> Any:
        weights.set("2")
        return await ok()(server, request, request_body)

    async def body() -> None:
        async with start_proxy(ScriptedModel(step), weights=weights) as proxy:
            await proxy.chat()
            call = await proxy.last_call()
            assert (call.admitted_version, call.weight_version) == ("1", "2")
            await proxy.chat("again")
            call = await proxy.last_call()
            assert (call.admitted_version, call.weight_version) == ("2", "2")

    run(body())
