import pytest
from hypothesis import given
from hypothesis import strategies as some

from paddock.scale.splice import Frames, accept_key, closing, frame


def test_the_accept_key_is_the_one_of_the_standard() -> None:
    assert accept_key("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


@given(some.lists(some.integers(0, 70_000), min_size=1, max_size=4), some.integers(1, 9))
def test_frames_are_followed_however_they_are_cut(sizes: list[int], piece: int) -> None:
    stream = b"".join(frame(bytes(size)) for size in sizes)
    ends, end = set(), 0
    for size in sizes:
        end += len(frame(bytes(size)))
        ends.add(end)
    follower, at = Frames(), 0
    step = max(piece, len(stream) // 50)
    while at < len(stream):
        follower.follow(stream[at : at + step])
        at = min(at + step, len(stream))
        assert follower.between == (at in ends)


@pytest.mark.parametrize("word", [frame(b"hello"), frame(b"", 0x9)])
def test_a_goodbye_is_told_from_other_frames(word: bytes) -> None:
    frames = Frames()
    frames.follow(word)
    assert not frames.closed
    frames.follow(word + closing(1000, "bye") + word)
    assert frames.closed
