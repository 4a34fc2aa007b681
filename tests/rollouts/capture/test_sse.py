"""The event reader gives the same events however the bytes are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.rollouts.capture import sse
from paddock.rollouts.capture.sse import EventReader, EventTooLong, event

STREAM = b': hi\n\ndata: {"a":1}\n\nevent: x\ndata:two\r\ndata: lines\r\n\r\nid: 4\n\ndata: [DONE]\n\ndata: cut'
EVENTS = [b'{"a":1}', b"two\nlines", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cuts_give_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader()
    found = [data for a, b in pairwise(edges) for data in reader.feed(STREAM[a:b])]
    assert found == EVENTS


@pytest.mark.parametrize(
    ("pieces", "only_comments"),
    [
        ([b": hi\n\n"], [True]),
        ([b": hi\n\ndata: x\n\n"], [False]),
        ([b"data: x\n\n: hi\r\n\r\n"], [False]),
        ([b":", b" h", b"i\n\n", b"d", b"ata: x\n", b"\n"], [True, True, True, False, False, True]),
    ],
)
def test_comments_are_told_from_data(pieces: list[bytes], only_comments: list[bool]) -> None:
    reader = EventReader()
    assert [(reader.feed(piece), reader.only_comments)[1] for piece in pieces] == only_comments


def test_what_is_written_can_be_read() -> None:
    assert EventReader().feed(event(b"x") + sse.KEEP_ALIVE + event(b"y")) == [b"x", b"y"]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "LONGEST_EVENT", 10)
    with pytest.raises(EventTooLong):
        EventReader().feed(b"data: far too long")
