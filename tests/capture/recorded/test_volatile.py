"""Times, ids and ports are masked; ordinary text is not."""

import pytest

from paddock.capture.recorded.volatile import mask_volatile


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("finished at 2026-11-18 21:08:55.123", "finished at 2025-01-02 03:04:05.6"),
        ("2026-11-18T21:08:55Z", "2026-11-19T01:02:03Z"),
        ("Today's date: Wed Nov 18 2026", "Today's date: Thu Nov 19 2026"),
        ("Wed Nov 18 20:47:57 UTC 2026", "Thu Dec  3 01:02:03 UTC 2026"),
        ("-rw-r--r-- 1 root root 5 Nov 18 20:47 a.txt", "-rw-r--r-- 1 root root 5 Dec 19 01:02 a.txt"),
        ("3 passed in 0.12s", "3 passed in 1.05s"),
        ("took 12 ms", "took 7 ms"),
        ("<duration_ms>2263</duration_ms>", "<duration_ms>12</duration_ms>"),
        ('{"elapsed": 1.25}', '{"elapsed": 0.5}'),
        ("http://127.0.0.1:40123/v1", "http://127.0.0.1:51515/v1"),
        ("listening on port 40123", "listening on port 51515"),
        ("pid 123", "pid 45678"),
        ("[1] 4711", "[1] 12"),
        ("id 123e4567-e89b-12d3-a456-426614174000", "id 00000000-e89b-12d3-a456-426614174000"),
        ("commit 4b80237 images", "commit 4233fe8 images"),
        ("<Cell object at 0x7f6998bf4e00>", "<Cell object at 0x7f8528a03ad0>"),
        ("call_abc123def456", "call_xyz789uvw012"),
        ("Chunk ID: bd4c52", "Chunk ID: 061350"),
        ("[... 22013 more characters truncated]", "[... 7 more characters truncated]"),
        ("/tmp/tmpab12cd/file", "/tmp/tmpzz99yy/file"),
        ("1795036036.99", "1795036037.18"),
    ],
)
def test_volatile_parts_do_not_count(one: str, other: str) -> None:
    assert mask_volatile(one) == mask_volatile(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2 passed, 1 failed", "3 passed, 0 failed"),
        ("answer: 42", "answer: 43"),
        ("deadbeef", "feedface"),
        ("line 17 of counter.py", "line 18 of counter.py"),
        ("version 3.11.7", "version 3.12.1"),
    ],
)
def test_ordinary_numbers_and_words_count(one: str, other: str) -> None:
    assert mask_volatile(one) != mask_volatile(other)


def test_a_text_without_volatile_parts_stays() -> None:
    text = "def merge(intervals):\n    return sorted(intervals)  # O(n log n), 100 lines\n"
    assert mask_volatile(text) == text
