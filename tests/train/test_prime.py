"""prime-rl: batches of a stream, with an advantage for each token."""

from pathlib import Path

import pytest

from paddock.train.prime import batches
from train.streaming import Place, Streams, run, tasks


def test_a_batch_has_the_samples_of_a_version_with_their_advantages(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            Streams(tmp_path) as streams,
            streams.stream(
                streams.source(Place(), tasks(4), name="doing"), batch_size=2, rounds=1, version=3
            ) as stream,
        ):
            seen = []
            async for batch in batches(stream):
                seen.append(batch)
                await stream.update_weights(batch.step + 1)
            assert [batch.step for batch in seen] == [3, 4]
            assert stream.statistics().acknowledged == 4
        example = seen[0].examples[0]
        assert {len(example[name]) for name in ("token_ids", "mask", "logprobs", "temperatures", "advantages")} == {
            len(example["token_ids"])
        }
        assert example["env_name"] == "doing"
        assert all(value == 0 for value, mask in zip(example["advantages"], example["mask"], strict=True) if not mask)
        totals = sorted(max(each["advantages"], key=abs) for each in seen[0].examples)
        assert totals == pytest.approx([-1.0, -1.0, 1.0, 1.0], abs=1e-3)

    run(work())
