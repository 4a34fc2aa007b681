"""The reader returns the same events however the bytes are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.protocol import sse
from paddock.protocol.sse import EventReader, EventTooLong, SseEvent, write_event

STREAM = b': hi\n\ndata: {"a":1}\n\nevent: x\ndata:two\r\ndata: lines\r\n\r\nid: 4\n\ndata: [DONE]\n\ndata: cut'
EVENTS = [SseEvent(b'{"a":1}'), SseEvent(b"two\nlines", "x"), SseEvent(b"[DONE]")]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cuts_give_the_same_events(line_end: bytes, cuts: list[int]) -> None:
    stream = STREAM.replace(b"\r\n", b"\n").replace(b"\n", line_end)
    edges = [0, *sorted(cuts), max(len(stream), *cuts, 0)]
    reader = EventReader()
    events = [event for a, b in pairwise(edges) for event in reader.feed(stream[a:b])]
    assert events == EVENTS
    assert reader.last_id == "4"


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_line_ends_may_be_mixed(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader()
    assert [event for a, b in pairwise(edges) for event in reader.feed(STREAM[a:b])] == EVENTS


def test_an_id_counts_once_its_event_has_ended() -> None:
    reader = EventReader()
    assert reader.feed(b"id: 1\ndata: a\n\nid: 2\ndata: b\n") == [SseEvent(b"a")]
    assert reader.last_id == "1"
    assert reader.feed(b"\n") == [SseEvent(b"b")]
    assert reader.last_id == "2"


@pytest.mark.parametrize(
    ("pieces", "only_comments"),
    [
        ([b": hi\n\n"], [True]),
        ([b": hi\n\ndata: x\n\n"], [False]),
        ([b"data: x\n\n: hi\r\n\r\n"], [False]),
        ([b":", b" h", b"i\n\n", b"d", b"ata: x\n", b"\n"], [True, True, True, False, False, True]),
    ],
)
def test_comments_are_not_data(pieces: list[bytes], only_comments: list[bool]) -> None:
    reader = EventReader()
    assert [(reader.feed(piece), reader.only_comments)[1] for piece in pieces] == only_comments


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (write_event(b"x"), SseEvent(b"x")),
        (write_event(b"x", "ping"), SseEvent(b"x", "ping")),
        (write_event(b"two\nlines"), SseEvent(b"two\nlines")),
        (write_event(b"x", "ping", id=7), SseEvent(b"x", "ping")),
    ],
)
def test_what_is_written_can_be_read(written: bytes, read: SseEvent) -> None:
    assert EventReader().feed(sse.KEEP_ALIVE + written + sse.KEEP_ALIVE) == [read]


def test_an_event_is_written_with_its_id_first() -> None:
    assert write_event(b"x", "ping", id=7) == b"id: 7\nevent: ping\ndata: x\n\n"


@pytest.mark.parametrize("piece", [b"data: far too long", b"data: 12345\n" * 3], ids=["one_line", "many_lines"])
def test_an_event_without_end_is_refused(piece: bytes) -> None:
    reader = EventReader(max_event_bytes=12)
    with pytest.raises(EventTooLong):
        reader.feed(piece)
