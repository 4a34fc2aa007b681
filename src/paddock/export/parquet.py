"""Parquet: one row for each sample, written without a Python object per token.

Ids, mask and logprobs are copied from the store's bytes to Arrow's buffers (logprobs as 32-bit floats, which is what
trainers compute with). pandas, polars, datasets and DuckDB read it.
"""

from __future__ import annotations

from array import array
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import orjson

from paddock.distribution import install_command
from paddock.errors import ConfigError
from paddock.export import Form, checks
from paddock.export.samples import chains, group_id_of, metadata, samples
from paddock.store.packing import PrefixedIds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import pyarrow

    from paddock.capture.trace import Call
    from paddock.export.policy import Policy
    from paddock.export.samples import CallChain
    from paddock.store.record import RolloutRecord

ROW_GROUP_TOKENS = 1_000_000
"""A row group is written when it holds this many: enough to compress well, little enough to hold in memory."""
PLAIN = (
    *("rollout_id", "task_id", "group_id", "outcome", "reward", "reward_parts", "branch", "is_last", "label"),
    *("finish_reason", "calls", "weight_versions", "metadata"),
)
"""Columns that are built from Python values."""


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    """The rows of one rollout as objects. A file is written by `ParquetWriter`, which is much faster."""
    for sample in samples(record, calls, policy):
        yield {
            **{name: getattr(sample, name) for name in ("rollout_id", "task_id", "group_id", "outcome", "reward")},
            "reward_parts": orjson.dumps(sample.reward_parts).decode(),
            **{name: getattr(sample, name) for name in ("branch", "is_last", "label", "finish_reason")},
            "calls": list(sample.calls),
            "weight_versions": list(sample.weight_versions),
            **{name: getattr(sample, name) for name in ("prompt_ids", "response_ids", "mask", "logprobs")},
            "metadata": orjson.dumps(sample.metadata).decode(),
        }


def find_problems(document: dict[str, Any]) -> Iterator[str]:
    yield from checks.training_sequence(
        document,
        ids=("prompt_ids", "response_ids"),
        aligned=("response_ids", "mask", "logprobs"),
        mask_name="mask",
        logprobs_name="logprobs",
    )
    yield from checks.reward(document["reward"])


def validate(document: dict[str, Any]) -> None:
    import pyarrow

    pyarrow.Table.from_pylist([document], schema=schema(pyarrow)).validate(full=True)


def schema(arrow: Any) -> pyarrow.Schema:
    text = arrow.string()
    fields: dict[str, Any] = {
        **dict.fromkeys(("rollout_id", "task_id", "group_id", "outcome"), text),
        "reward": arrow.float64(),
        "reward_parts": text,
        "branch": arrow.int32(),
        "is_last": arrow.bool_(),
        "label": text,
        "finish_reason": text,
        "calls": arrow.list_(text),
        "weight_versions": arrow.list_(text),
        "prompt_ids": arrow.list_(arrow.int32()),
        "response_ids": arrow.list_(arrow.int32()),
        "mask": arrow.list_(arrow.int8()),
        "logprobs": arrow.list_(arrow.float32()),
        "metadata": text,
    }
    return arrow.schema(list(fields.items()))


class ListColumn:
    """A column of lists of numbers, collected as bytes."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.lengths: list[int] = []

    def column(self, arrow: Any, kind: Any) -> Any:
        values = arrow.Array.from_buffers(kind, sum(self.lengths), [None, arrow.py_buffer(b"".join(self.pieces))])
        offsets = array("i", accumulate(self.lengths, initial=0))
        offsets = arrow.Array.from_buffers(arrow.int32(), len(offsets), [None, arrow.py_buffer(offsets.tobytes())])
        return arrow.ListArray.from_arrays(offsets, values)


class RowGroup:
    """The rows of a row group, collected column by column."""

    def __init__(self) -> None:
        self.plain: dict[str, list[Any]] = {name: [] for name in PLAIN}
        self.prompt_ids, self.response_ids, self.mask, self.logprobs = (ListColumn() for _ in range(4))
        self.tokens = 0

    def add_row(self, record: RolloutRecord, chain: CallChain, *, is_last: bool) -> None:
        values = (
            *(record.rollout_id, record.task_id, group_id_of(record), str(record.outcome), record.reward),
            *(orjson.dumps(record.reward_parts).decode(), chain.branch, is_last, str(chain.label)),
            *(chain.calls[-1].finish_reason, [call.id for call in chain.calls]),
            [call.weight_version for call in chain.calls],
            orjson.dumps(metadata(record, chain)).decode(),
        )
        for column, value in zip(self.plain.values(), values, strict=True):
            column.append(value)
        prompt = chain.calls[0].prompt_token_ids
        self.prompt_ids.pieces.append(to_bytes(prompt))
        self.prompt_ids.lengths.append(len(prompt))
        self._add_response(chain)
        self.tokens += len(prompt) + self.response_ids.lengths[-1]

    def _add_response(self, chain: CallChain) -> None:
        ids, mask, logprobs = self.response_ids.pieces, self.mask.pieces, self.logprobs.pieces
        start = end = len(chain.calls[0].prompt_token_ids)
        for call, trained in zip(chain.calls, chain.trained, strict=True):
            # The tokens between this call and the one before were not sampled.
            prompt, sampled = call.prompt_token_ids, len(call.completion_token_ids)
            if added := len(prompt) - end:
                ids.append(to_bytes(prompt[end:]))
                mask.append(bytes(added))
                logprobs.append(bytes(added * 8))
            ids.append(to_bytes(call.completion_token_ids))
            mask.append(b"\1" * sampled if trained else bytes(sampled))
            logprobs.append(to_bytes(call.logprobs, "d") if trained else bytes(sampled * 8))
            end += added + sampled
        for column in (self.response_ids, self.mask, self.logprobs):
            column.lengths.append(end - start)

    def table(self, arrow: Any) -> pyarrow.Table:
        target = schema(arrow)
        columns = {name: arrow.array(values, target.field(name).type) for name, values in self.plain.items()}
        columns["prompt_ids"] = self.prompt_ids.column(arrow, arrow.int32())
        columns["response_ids"] = self.response_ids.column(arrow, arrow.int32())
        columns["mask"] = self.mask.column(arrow, arrow.int8())
        columns["logprobs"] = self.logprobs.column(arrow, arrow.float64()).cast(arrow.list_(arrow.float32()))
        return arrow.table([columns[name] for name in target.names], schema=target)


class ParquetWriter:
    """Writes a file. Each row group is compressed on a thread, without the GIL, while the next one is collected."""

    def __init__(self, path: Path, policy: Policy) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise ConfigError("Parquet needs pyarrow", hint=install_command("parquet")) from error
        self._arrow = pyarrow
        self._policy = policy
        self._file = pyarrow.parquet.ParquetWriter(
            path,
            schema(pyarrow),
            compression="zstd",
            compression_level=1,
            use_dictionary=[name for name in PLAIN if name != "metadata"],
            write_statistics=False,
        )
        self._rows = RowGroup()
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paddock-parquet")

    def __enter__(self) -> ParquetWriter:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._flush()
            self._wait()
        finally:
            self._thread.shutdown()
            self._file.close()

    def add(self, record: RolloutRecord, calls: Sequence[Call]) -> tuple[int, int]:
        """Write a rollout; returns how many rows it has, and how many tokens are in them."""
        if self._policy.rejects(record) is not None:
            return 0, 0
        rows, before = chains(calls, self._policy), self._rows.tokens
        for number, chain in enumerate(rows, 1):
            self._rows.add_row(record, chain, is_last=number == len(rows))
        tokens = self._rows.tokens - before
        if self._rows.tokens >= ROW_GROUP_TOKENS:
            self._flush()
        return len(rows), tokens

    def _flush(self) -> None:
        if not self._rows.tokens:
            return
        rows, self._rows = self._rows, RowGroup()
        # One row group waits at most: more would be held in memory.
        self._wait()
        self._writing = self._thread.submit(lambda: self._file.write_table(rows.table(self._arrow)))

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()


def to_bytes(values: Sequence[Any], kind: str = "I") -> bytes:
    return values.tobytes() if isinstance(values, array | PrefixedIds) else array(kind, values).tobytes()


FORM = Form(
    summary="one row for each sample (needs --out)",
    export=export,
    find_problems=find_problems,
    package="pyarrow",
    validate=validate,
    suffix="parquet",
    open_writer=ParquetWriter,
)
