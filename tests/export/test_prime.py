"""prime-rl: one flat sequence."""

from export.rollouts import END, conversation, exported


def test_a_sample_is_one_flat_sequence() -> None:
    (sample,) = exported("prime", conversation(2, forwarded={"temperature": 0.7}))
    assert sample["token_ids"] == [1, 2, 3, 100, 200, END, 60, 101, 201, END]
    assert sample["mask"] == [False] * 3 + [True] * 3 + [False] + [True] * 3
    assert sample["temperatures"] == [0.7] * 10
    assert sample["env_name"] == "t1"
