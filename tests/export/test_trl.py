"""TRL: rows and columns."""

from export.rollouts import END, conversation, exported, forked, record
from paddock.export.samples import samples
from paddock.export.trl import columns


def test_rows_and_columns_agree() -> None:
    (row,) = exported("trl", conversation(2))
    assert row["prompt_ids"] == [1, 2, 3]
    assert row["completion_ids"] == [100, 200, END, 60, 101, 201, END]
    assert row["env_mask"] == [1, 1, 1, 0, 1, 1, 1]
    table = columns(samples(record(), forked()))
    assert {len(column) for column in table.values()} == {3}
    assert columns([]) == {"prompt_ids": [], "completion_ids": [], "logprobs": []}
