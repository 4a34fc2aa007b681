"""Every call keeps the weights it was sampled from: told by the engine, or said by the trainer."""

from typing import Any

import pytest

from paddock.rollouts.capture.answer import Answer
from paddock.rollouts.trace import Call
from paddock.rollouts.weights import Weights
from rollouts.capture.rig import rig, run
from rollouts.capture.scripted import Scripted, ok


def test_a_version_is_set_or_asked_for() -> None:
    weights = Weights(3)
    assert weights.current() == "3"
    weights.set("step-4")
    assert weights.current() == "step-4"
    step = 7
    asked = Weights(lambda: step)
    assert asked.current() == "7"
    assert Weights.of(asked) is asked
    assert Weights.of(None).current() is None


def told(*, first: str | None, last: str | None, admitted: str | None, said: str | None) -> Call:
    """A call whose engine told two versions, and whose trainer said one at the start and one at the end."""
    answer, call = Answer(strip=True), Call("c0", 0, admitted_version=admitted)
    answer.take({"choices": [], **({"weight_version": first} if first else {})})
    answer.take({"choices": [], **({"metadata": {"weight_version": last}} if last else {})})
    answer.tell_version(said, engine=False)
    answer.apply(call)
    return call


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"first": "5", "last": "5", "admitted": None, "said": None}, (None, "5")),
        ({"first": "5", "last": "6", "admitted": None, "said": None}, ("5", "6")),
        ({"first": None, "last": None, "admitted": "8", "said": "9"}, ("8", "9")),
        ({"first": "5", "last": "5", "admitted": "4", "said": "9"}, (None, "5")),
        ({"first": None, "last": None, "admitted": None, "said": None}, (None, None)),
    ],
    ids=["engine", "engine, changed", "trainer, changed", "both", "nobody"],
)
def test_both_versions_of_a_call_are_kept(
    versions: dict[str, str | None], expected: tuple[str | None, str | None]
) -> None:
    call = told(**versions)
    assert (call.admitted_version, call.weight_version) == expected


def test_a_call_keeps_what_the_trainer_says_at_its_beginning_and_at_its_end() -> None:
    weights = Weights("1")

    async def step(server: Scripted, request: Any, asked: dict[str, Any]) -> Any:
        weights.set("2")
        return await ok()(server, request, asked)

    async def body() -> None:
        async with rig(Scripted(step), weights=weights) as r:
            await r.ask()
            call = await r.last()
            assert (call.admitted_version, call.weight_version) == ("1", "2")
            await r.ask("again")
            call = await r.last()
            assert (call.admitted_version, call.weight_version) == ("2", "2")

    run(body())
