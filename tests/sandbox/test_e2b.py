"""The e2b backend, as far as it can be seen without E2B's SDK; `end_to_end/test_e2b.py` has the rest."""

import asyncio
import base64
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from paddock.errors import SandboxError
from paddock.limits import SandboxLimits
from paddock.sandbox import SandboxSpec, available, open_sandbox
from paddock.sandbox.e2b import E2bCommandChannel


def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(SandboxError, match="E2B's SDK") as caught:
        asyncio.run(open_sandbox("e2b", SandboxSpec(SandboxLimits())))
    assert caught.value.hint == "pip install 'paddock-rl[e2b]'"
    assert "paddock-rl[e2b]" in str(available("e2b"))


def test_frames_come_as_lines_however_the_text_is_cut() -> None:
    async def main() -> list[bytes]:
        channel = E2bCommandChannel(SimpleNamespace())
        text = "".join(base64.b64encode(data).decode() + "\n" for data in (b"\xff\x00", b"second"))
        for letter in text:
            channel._receive_text(letter)
        return [await channel.receive() for _ in range(2)]

    assert asyncio.run(main()) == [b"\xff\x00", b"second"]


def test_what_is_sent_keeps_its_order_and_fits_into_a_request() -> None:
    sent: list[Any] = []

    async def send_stdin(pid: int, data: bytes) -> None:
        sent.append((pid, len(data), data[:1]))

    async def main() -> None:
        channel = E2bCommandChannel(SimpleNamespace(commands=SimpleNamespace(send_stdin=send_stdin)))
        channel._handle = SimpleNamespace(pid=7)
        await channel.send(b"a" * (1 << 20) + b"b")

    asyncio.run(main())
    assert sent == [(7, 1 << 20, b"a"), (7, 1, b"b")]
