import pytest
from hypothesis import given
from hypothesis import strategies as some
from websockets.frames import Frame, Opcode

from paddock.scale.websocket_relay import FrameTracker, close_frame, text_frame


@given(some.lists(some.integers(0, 70_000), min_size=1, max_size=4), some.integers(1, 9))
def test_frames_are_followed_however_they_are_cut(sizes: list[int], piece: int) -> None:
    stream = b"".join(text_frame(bytes(size)) for size in sizes)
    ends, end = set(), 0
    for size in sizes:
        end += len(text_frame(bytes(size)))
        ends.add(end)
    follower, at = FrameTracker(), 0
    step = max(piece, len(stream) // 50)
    while at < len(stream):
        follower.feed(stream[at : at + step])
        at = min(at + step, len(stream))
        assert follower.is_between_frames == (at in ends)


@pytest.mark.parametrize("word", [text_frame(b"hello"), Frame(Opcode.PING, b"").serialize(mask=False)])
def test_a_close_frame_is_recognized(word: bytes) -> None:
    frames = FrameTracker()
    frames.feed(word)
    assert not frames.closed
    frames.feed(word + close_frame(1000, "bye") + word)
    assert frames.closed
