"""The log of one sandbox: a flood of connections hides none."""

import pytest

from paddock.sandbox.network import connections
from paddock.sandbox.network.connections import OTHER_HOSTS, ConnectionLog, ConnectionRecord


def connect(log: ConnectionLog, host: str, *, count: int = 1, sent_bytes: int = 1) -> None:
    for _ in range(count):
        live = log.open(host, 443, "agent")
        live.sent_bytes = sent_bytes
        log.end(live)


def test_a_flood_hides_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_RECORDS", 3)
    log = ConnectionLog()
    reported: list[ConnectionRecord] = []
    log.on_end = reported.append
    connect(log, "flood.example", count=10)
    connect(log, "hidden.example", sent_bytes=500)
    assert [(record.host, record.count) for record in log.records[3:]] == [
        ("flood.example", 7),
        ("hidden.example", 1),
    ]
    assert sum(record.sent_bytes for record in log.records) == 510
    assert len(reported) == 3
    log.close()
    log.close()
    assert tuple(reported) == log.records


def test_summaries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_RECORDS", 1)
    monkeypatch.setattr(connections, "MOST_SUMMARIES", 2)
    log = ConnectionLog()
    for number in range(6):
        connect(log, f"{number}.example")
    assert [(record.host, record.count) for record in log.records[3:]] == [(OTHER_HOSTS, 3)]
