"""Good environments pass, and each check fails for the environment that breaks it, and says why."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from paddock.envs.counter import Counter
from paddock.envs.echo import Echo
from paddock.testing import Result, check_environment, failed
from paddock.testing.environment import ENVIRONMENT

from . import broken


def examined(make: Callable[[], Any], timeout: float = 10.0) -> dict[str, Result]:
    return {result.name: result for result in asyncio.run(check_environment(make, timeout=timeout))}


@pytest.mark.parametrize(
    "make",
    [Counter, Echo, broken.Good, broken.GoodTools, broken.GoodAsync, broken.AloneOnly, lambda: broken.Good()],
)
def test_a_good_environment_passes(make: Callable[[], Any]) -> None:
    results = examined(make).values()
    assert {result.outcome for result in results} == {"passed", "skipped"}
    assert len(results) == len(ENVIRONMENT.checks)


BROKEN: list[tuple[Any, str, str, str]] = [
    (broken.CannotBeBuilt, "it can be built", "failed", "no licence"),
    (broken.HasNoStep, "it can be built", "failed", "has no step"),
    (broken.CannotBeDescribed, "its schemas can be produced", "failed", "Thing"),
    (broken.SaysNothingOfItself, "it describes itself", "warning", "does not say what it is"),
    (broken.ResetsToNothing, "reset returns the observation type", "failed", "NoneType came back"),
    (broken.ResetsToAnotherType, "reset returns the observation type", "failed", "Total is declared"),
    (broken.ResetsToABadDict, "reset returns the observation type", "failed", "total: Input should be"),
    (broken.IgnoresTheSeed, "the same seed gives the same first observation", "failed", "total"),
    (broken.Unguessable, "an example action can be made from the schema", "warning", "pattern"),
    (broken.SaysNoActionType, "an example action can be made from the schema", "failed", "actions look like"),
    (broken.HasNoTools, "an example action can be made from the schema", "failed", "no tools"),
    (broken.StepFails, "a step with an example action works", "failed", "ValueError: illegal move"),
    (broken.ToolFails, "each tool answers an example call", "warning", "open_door: KeyError"),
    (broken.StepsToAnotherType, "step returns the observation type", "failed", "Observation came back"),
    (broken.RewardIsNaN, "rewards are numbers or none", "failed", "is nan"),
    (broken.RewardIsAWord, "rewards are numbers or none", "failed", "'plenty', a str"),
    (broken.DoneIsANumber, "done is true or false", "failed", "is 1, a int"),
    (broken.ObservationLosesItsWeight, "observations survive json", "failed", "weight"),
    (broken.ObservationCannotBeWritten, "observations survive json", "failed", "cannot be written"),
    (broken.StateCannotBeWritten, "the state survives json", "failed", "cannot be written"),
    (broken.CountsNoSteps, "the state has an episode id and counts steps", "failed", "0 after one step"),
    (broken.StateHasNoEpisode, "the state has an episode id and counts steps", "failed", "no episode_id"),
    (broken.EpisodeHasNoName, "the state has an episode id and counts steps", "warning", "is None"),
    (broken.StateChangesWhenRead, "reading the state changes nothing", "failed", "total"),
    (broken.NeverBeginsAnew, "reset begins a new episode", "failed", "step_count is 1"),
    (broken.ForgetsTheEpisodeItIsGiven, "reset begins a new episode", "warning", "episode_id"),
    (broken.ToolWithoutDescription, "tools have descriptions", "failed", "jump"),
    (broken.ToolWithoutTypes, "arguments of tools have types", "failed", r"jump\(height\)"),
    (broken.TakesEveryAction, "a bad action is refused and changes nothing", "failed", "a list as 'amount'"),
    (broken.CloseNeedsAReset, "close works before the first reset", "failed", "AttributeError"),
    (broken.CloseFailsAfterAFailure, "close works after a failed step", "failed", "holding the lock"),
    (broken.SharesItsTotal, "sessions share nothing", "failed", "after another session acted"),
    (broken.SharesItsSight, "sessions share nothing", "failed", "while another session acted"),
    (broken.ClingsToItsThread, "any thread may call it", "failed", "another thread"),
    (broken.SlowThoughInline, "calls are as fast as declared", "warning", "inline = True"),
    (broken.BlocksTheLoop, "async methods leave the loop free", "warning", "stood still"),
    (broken.ReturnsMoreThanItDeclares, "a client can play an episode", "failed", "does not fit Total"),
]


@pytest.mark.parametrize(("make", "name", "outcome", "detail"), BROKEN, ids=lambda value: str(value)[-60:])
def test_a_broken_environment_is_found_out(make: Any, name: str, outcome: str, detail: str) -> None:
    result = examined(make)[name]
    assert result.outcome == outcome, result
    assert re.search(detail, result.detail), result
    assert result.hint


def test_every_check_can_fail() -> None:
    assert {name for _, name, _, _ in BROKEN} == {check.name for check in ENVIRONMENT.checks}


def test_nothing_is_looked_at_if_it_cannot_be_built() -> None:
    results = examined(broken.CannotBeBuilt).values()
    assert [result.outcome for result in results] == ["failed"] + ["skipped"] * (len(results) - 1)


def test_a_step_that_hangs_does_not_hold_up_the_rest() -> None:
    results = examined(broken.StepHangs, timeout=0.2)
    assert results["a step with an example action works"].detail == "step did not answer within 0.2 s"
    assert results["rewards are numbers or none"].outcome == "skipped"
    assert results["close works before the first reset"].outcome == "passed"


def test_what_does_not_apply_is_skipped() -> None:
    results = examined(broken.WithoutSeed)
    assert failed(results.values()) == []
    assert results["the same seed gives the same first observation"].detail == "reset takes no seed"
    assert results["sessions share nothing"].outcome == "skipped"
    assert results["the state survives json"].detail == "kept by the server"
