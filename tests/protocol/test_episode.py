import pytest

from paddock.errors import SessionClosed
from paddock.protocol.episode import NEXT, CallTool, Episode, GetState, ListTools, Phase, Reset, Step

REQUESTS = (Reset(), Step(None), GetState(), ListTools(), CallTool("t"))
OPEN_PHASES = (Phase.NEW, Phase.RUNNING, Phase.DONE)


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("phase", OPEN_PHASES)
def test_every_request_has_a_row_in_every_open_phase(phase: Phase, request_: object) -> None:
    assert (phase, type(request_)) in NEXT


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_closed_episode_refuses_everything(request_: object) -> None:
    episode = Episode()
    episode.close()
    with pytest.raises(SessionClosed):
        episode.accept(request_)  # type: ignore[arg-type]
    assert episode.phase is Phase.CLOSED


@pytest.mark.parametrize("look", [GetState(), ListTools()])
@pytest.mark.parametrize("phase", OPEN_PHASES)
def test_looking_changes_nothing(phase: Phase, look: object) -> None:
    episode = Episode()
    episode.phase = phase
    episode.accept(look)  # type: ignore[arg-type]
    assert episode.phase is phase


def test_acting_before_the_first_reset_is_allowed() -> None:
    episode = Episode()
    episode.accept(Step(None))
    assert episode.phase is Phase.RUNNING


def test_acting_after_the_end_is_allowed_and_stays_done() -> None:
    episode = Episode()
    episode.accept(Reset())
    episode.record_reset(None, done=False)
    episode.record_step(done=True)
    episode.accept(Step(None))
    episode.record_step(done=False)
    assert (episode.phase, episode.steps) == (Phase.DONE, 2)


def test_a_reset_begins_a_new_episode() -> None:
    episode = Episode()
    episode.record_reset("first", done=False)
    episode.record_step(done=True)
    episode.accept(Reset())
    episode.record_reset(None, done=False)
    assert (episode.phase, episode.steps) == (Phase.RUNNING, 0)
    assert episode.id != "first"


def test_a_reset_keeps_the_id_it_was_asked_for() -> None:
    episode = Episode()
    episode.record_reset("mine", done=False)
    assert episode.id == "mine"


def test_an_episode_can_be_over_at_its_reset() -> None:
    episode = Episode()
    episode.record_reset(None, done=True)
    assert episode.phase is Phase.DONE


def test_a_reset_that_failed_leaves_the_count_alone() -> None:
    episode = Episode()
    episode.record_reset("first", done=False)
    episode.record_step(done=False)
    episode.accept(Reset())
    assert (episode.id, episode.steps) == ("first", 1)
