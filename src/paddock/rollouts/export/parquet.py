"""Parquet: one row for each sample, written without a Python object for any token.

Ids, mask and logprobs go from the store's bytes to Arrow's buffers as they are (logprobs as 32-bit floats, which
is what trainers compute with). Read it with pandas, polars, datasets, DuckDB.
"""

from __future__ import annotations

from array import array
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import orjson

from paddock.distribution import install_command
from paddock.errors import ConfigError
from paddock.rollouts.export import checks
from paddock.rollouts.export.samples import group_of, lines, metadata, samples
from paddock.rollouts.tokens import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import pyarrow

    from paddock.rollouts.export.policy import Policy
    from paddock.rollouts.export.samples import Line
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.trace import Call

WHOLE = False
PACKAGE = "pyarrow"
ROW_GROUP_TOKENS = 1_000_000
"""A row group is written when it holds this many: enough to compress well, little enough to hold in memory."""
PART_TOKENS = 400_000
"""A part is full with this many."""


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    """The rows of one rollout as objects. A file is written by `Writer`, which is much quicker."""
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


def complaints(document: dict[str, Any]) -> Iterator[str]:
    yield from checks.token_ids(document["prompt_ids"], "prompt_ids")
    yield from checks.token_ids(document["response_ids"], "response_ids")
    yield from checks.equal_lengths(document, "response_ids", "mask", "logprobs")
    yield from checks.mask(document["mask"], "mask")
    yield from checks.logprobs(document["logprobs"], "logprobs")
    yield from checks.masked_logprobs(document["logprobs"], document["mask"], "logprobs")
    yield from checks.reward(document["reward"])


def accept(document: dict[str, Any]) -> None:
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


class Numbers:
    """A column of lists, gathered as bytes."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.lengths: list[int] = []

    def column(self, arrow: Any, kind: Any) -> Any:
        values = arrow.Array.from_buffers(kind, sum(self.lengths), [None, arrow.py_buffer(b"".join(self.pieces))])
        offsets = array("i", accumulate(self.lengths, initial=0))
        offsets = arrow.Array.from_buffers(arrow.int32(), len(offsets), [None, arrow.py_buffer(offsets.tobytes())])
        return arrow.ListArray.from_arrays(offsets, values)


class Rows:
    """One part in the making: rows that a row group is made of."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.plain: dict[str, list[Any]] = {name: [] for name in PLAIN}
        self.prompt_ids, self.response_ids, self.mask, self.logprobs = (Numbers() for _ in range(4))
        self.tokens = 0

    @property
    def is_full(self) -> bool:
        return self.tokens >= PART_TOKENS

    def add(self, record: RolloutRecord, calls: Sequence[Call]) -> tuple[int, int]:
        """How many rows a rollout has, and how many tokens are in them."""
        if self._policy.refuses(record) is not None:
            return 0, 0
        found, before = lines(calls, self._policy), self.tokens
        for number, line in enumerate(found, 1):
            self._add_row(record, line, is_last=number == len(found))
        return len(found), self.tokens - before

    def _add_row(self, record: RolloutRecord, line: Line, *, is_last: bool) -> None:
        values = (
            *(record.rollout_id, record.task_id, group_of(record), str(record.outcome), record.reward),
            *(orjson.dumps(record.reward_parts).decode(), line.branch, is_last, str(line.label)),
            *(line.calls[-1].finish_reason, [call.id for call in line.calls]),
            [call.weight_version for call in line.calls],
            orjson.dumps(metadata(record, line)).decode(),
        )
        for column, value in zip(self.plain.values(), values, strict=True):
            column.append(value)
        prompt = line.calls[0].prompt_token_ids
        self.prompt_ids.pieces.append(packed(prompt))
        self.prompt_ids.lengths.append(len(prompt))
        self._add_response(line)
        self.tokens += len(prompt) + self.response_ids.lengths[-1]

    def _add_response(self, line: Line) -> None:
        ids, mask, logprobs = self.response_ids.pieces, self.mask.pieces, self.logprobs.pieces
        start = end = len(line.calls[0].prompt_token_ids)
        for call, trained in zip(line.calls, line.trained, strict=True):
            # What stands between this call and the one before was given to it.
            prompt, sampled = call.prompt_token_ids, len(call.completion_token_ids)
            if given := len(prompt) - end:
                ids.append(packed(prompt[end:]))
                mask.append(bytes(given))
                logprobs.append(bytes(given * 8))
            ids.append(packed(call.completion_token_ids))
            mask.append(b"\1" * sampled if trained else bytes(sampled))
            logprobs.append(packed(call.logprobs, "d") if trained else bytes(sampled * 8))
            end += given + sampled
        for numbers in (self.response_ids, self.mask, self.logprobs):
            numbers.lengths.append(end - start)

    def table(self, arrow: Any) -> pyarrow.Table:
        shape = schema(arrow)
        columns = {name: arrow.array(values, shape.field(name).type) for name, values in self.plain.items()}
        columns["prompt_ids"] = self.prompt_ids.column(arrow, arrow.int32())
        columns["response_ids"] = self.response_ids.column(arrow, arrow.int32())
        columns["mask"] = self.mask.column(arrow, arrow.int8())
        columns["logprobs"] = self.logprobs.column(arrow, arrow.float64()).cast(arrow.list_(arrow.float32()))
        return arrow.table([columns[name] for name in shape.names], schema=shape)

    def data(self) -> bytes | memoryview:
        """The table as a stream of Arrow; nothing if there are no rows."""
        if not self.prompt_ids.lengths:
            return b""
        import pyarrow

        table, out = self.table(pyarrow), pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
        return memoryview(out.getvalue())


PLAIN = (
    *("rollout_id", "task_id", "group_id", "outcome", "reward", "reward_parts", "branch", "is_last", "label"),
    *("finish_reason", "calls", "weight_versions", "metadata"),
)


class Writer:
    """Writes parts to a file, some to a row group. Row groups are compressed beside the shaping of the next."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise ConfigError("Parquet needs pyarrow", hint=install_command("parquet")) from error
        self._arrow = pyarrow
        self._file = pyarrow.parquet.ParquetWriter(
            path,
            schema(pyarrow),
            compression="zstd",
            compression_level=1,
            use_dictionary=[name for name in PLAIN if name != "metadata"],
            write_statistics=False,
        )
        self._tables: list[pyarrow.Table] = []
        self._tokens = 0
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paddock-parquet")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._flush()
            self._wait()
        finally:
            self._thread.shutdown()
            self._file.close()

    def add(self, data: bytes | memoryview, tokens: int) -> None:
        """The `data` of some `Rows`."""
        if not data:
            return
        with self._arrow.ipc.open_stream(data) as stream:
            self._tables.append(stream.read_all())
        self._tokens += tokens
        if self._tokens >= ROW_GROUP_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if not self._tables:
            return
        table = self._arrow.concat_tables(self._tables)
        self._tables, self._tokens = [], 0
        self._wait()
        self._writing = self._thread.submit(self._file.write_table, table)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()


_IN_BYTES = (array, Prompt)


def packed(values: Sequence[Any], kind: str = "I") -> bytes:
    return values.tobytes() if isinstance(values, _IN_BYTES) else array(kind, values).tobytes()
