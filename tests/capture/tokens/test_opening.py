"""Where tokenizers and renderers come from, and what is said when they cannot be used."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from capture.harness import run
from capture.token_engine import CHATML, TokenEngine, make_backend, write_tokenizer
from capture.tokens.harness import tokenizer_folder
from paddock.capture.settings import TokenSettings
from paddock.capture.tokens import tokenizer
from paddock.capture.tokens.opening import RenderingSource, is_here
from paddock.capture.tokens.rendering import Rendering, open_rendering
from paddock.capture.tokens.tokenizer import open_tokenizer
from paddock.capture.upstream import Upstream
from paddock.errors import ConfigError
from paddock.models.endpoint import Endpoint

TEXT = "Rollouts, 2026: ünïcode 🙂 don't\n\n\t<|im_start|>user\nhi<|im_end|> 1234"


def open_family(family: str | None, template: str | None = None, model: str = "model") -> Rendering:
    return open_rendering(
        open_tokenizer(tokenizer_folder(template)), family=family, model=model, thinking=False if family else None
    )


def write_gguf(file: Path, split: str = "gpt-2") -> None:
    """The tokenizer of the tests as the metadata of a GGUF file without tensors."""
    described = json.loads(make_backend().to_str())
    vocabulary = described["model"]["vocab"]
    special = {token["content"]: token["id"] for token in described["added_tokens"]}
    texts = sorted({**vocabulary, **special}, key=lambda text: {**vocabulary, **special}[text])
    kinds = [3 if text in special else 1 for text in texts]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
    values: list[tuple[str, Any]] = [
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", split),
        ("tokenizer.ggml.tokens", texts),
        ("tokenizer.ggml.token_type", kinds),
        ("tokenizer.ggml.merges", merges),
        ("tokenizer.ggml.eos_token_id", special["<|im_end|>"]),
        ("tokenizer.chat_template", CHATML),
    ]

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    def value(each: Any) -> bytes:
        if isinstance(each, str):
            return struct.pack("<I", 8) + string(each)
        if isinstance(each, int):
            return struct.pack("<II", 4, each)
        if isinstance(each[0], str):
            return struct.pack("<IIQ", 9, 8, len(each)) + b"".join(map(string, each))
        return struct.pack("<IIQ", 9, 5, len(each)) + struct.pack(f"<{len(each)}i", *each)

    body = b"".join(string(name) + value(each) for name, each in values)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + body)


def test_a_folder_and_a_gguf_file_give_the_same_ids(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    folder, file = open_tokenizer(tokenizer_folder()), open_tokenizer(str(tmp_path / "model.gguf"))
    assert file.encode(TEXT) == folder.encode(TEXT)
    assert file.decode(file.encode(TEXT)) == TEXT
    assert (file.eos_token, file.chat_template) == ("<|im_end|>", CHATML)
    assert folder.convert_tokens_to_ids(["<|im_end|>", "no such token"]) == [folder.eos_token_id, None]


def test_a_gguf_file_with_other_rules_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "chameleon")
    with pytest.raises(ConfigError, match="chameleon") as caught:
        open_tokenizer(str(tmp_path / "model.gguf"))
    assert "engine" in (caught.value.hint or "")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(30) + b"\xff" * 9, b"no such thing"])
def test_a_broken_gguf_file_is_a_config_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ConfigError):
        open_tokenizer(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["no/such-model", "nowhere", "/nowhere/at all"])
def test_nothing_is_downloaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("it connects"))
    with pytest.raises(ConfigError, match="no tokenizer") as caught:
        open_tokenizer(name)
    assert ("hf download no/such-model" in str(caught.value.hint)) is (name == "no/such-model")
    with pytest.raises(ConfigError, match="o200k_base"):
        open_family("gpt-oss")


def test_missing_packages_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "PACKAGES", ("no_such_package",))
    with pytest.raises(ConfigError, match="token mode needs the package renderers") as caught:
        open_tokenizer(tokenizer_folder())
    assert "paddock-rl[tokens]" in (caught.value.hint or "")


def test_the_name_of_a_model_decides_its_family() -> None:
    assert open_family(None, model="Qwen/Qwen3-8B").family == "qwen3"
    assert open_family(None, CHATML, model="my/finetune").family == "default"
    with pytest.raises(ConfigError, match="no known renderer"):
        open_family(None, model="my/finetune")
    with pytest.raises(ConfigError, match="there is no renderer 'qwen'"):
        open_family("qwen")
    with pytest.raises(ConfigError, match="glm-5 cannot be used"):
        open_family("glm-5")


def test_thinking_can_be_switched_off() -> None:
    rendering = open_family("qwen3")
    prompt = rendering.render([{"role": "user", "content": "hi"}], None)
    assert rendering.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_half_surrogate_in_arguments_can_be_sent() -> None:
    rendering = open_family("qwen3")
    text = '<tool_call>\n{"name": "bash", "arguments": {"command": "\\ud83d"}}\n</tool_call>'
    parsed = rendering.parse(rendering.tokenizer.encode(text), [], None)
    assert parsed.tool_calls[0]["function"]["arguments"] == '{"command": "\\ud83d"}'


def test_a_folder_without_a_tokenizer_is_not_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").mkdir()
    assert not is_here("policy")
    write_tokenizer(tmp_path / "policy")
    assert is_here("policy")


def letters() -> Tokenizer:
    """A tokenizer that no engine of the tests has: each byte is a token."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def test_the_endpoint_leads_to_its_tokenizer(tmp_path: Path) -> None:
    async def body() -> None:
        folder = write_tokenizer(tmp_path / "model", template=CHATML)
        async with TokenEngine(lambda prompt, calls: "", "llamacpp") as engine, Upstream() as upstream:
            for name, expected in ((folder, folder), ("unknown", "unknown")):
                endpoint = Endpoint(engine.url, name, engine="llamacpp")
                source = RenderingSource(TokenSettings(), endpoint, upstream, thinking=None)
                rendering = await source.check()
                assert rendering.tokenizer.name_or_path == expected
                assert rendering.tokenizer.is_remote is (name == "unknown")
            other = write_tokenizer(tmp_path / "other", template=CHATML, backend=letters())
            with pytest.raises(ConfigError, match=r"other is not that of .*: a text has other ids there"):
                await RenderingSource(TokenSettings(other), endpoint, upstream, thinking=None).check()
            text_only = Endpoint(engine.url, folder, engine="openai")
            with pytest.raises(ConfigError, match="token mode needs vLLM"):
                await RenderingSource(TokenSettings(), text_only, upstream, thinking=None).check()

    run(body())
