"""Chats whose template cannot be used: the server's fault is no 400."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import transformers

from prfaas.errors import ConfigError
from prfaas.gateway.tokenization.prompt_encoder import PromptMaker
from tests.gateway.conftest import make_checkpoint, running

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def with_template(path: Path, template: str | None) -> Path:
    """A checkpoint with this chat template."""
    path.mkdir()
    file = make_checkpoint(path) / "chat_template.jinja"
    file.unlink()
    if template is not None:
        file.write_text(template)
    return path


@pytest.mark.parametrize(
    ("template", "status", "said"),
    [
        ("{% for m in messages %}", 500, "the gateway failed; see its log"),
        ("{{ raise_exception('no such role') }}", 400, "no such role"),
        ("{{ messages[3].content }}", 400, "the chat template refuses the messages"),
        (None, 400, "chat_template is not set"),
    ],
)
async def test_a_fault_of_the_server_is_a_500_and_one_of_the_messages_a_400(
    identities: Path,
    tmp_path: Path,
    template: str | None,
    status: int,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    checkpoint = with_template(tmp_path / "model", template)
    async with running(checkpoint, identities, tmp_path / "state") as world:
        # It was tried with one message before the first client came.
        assert "chat template" in caplog.text
        found, answer = await world.post(BODY, CHAT)
        assert (found, said in answer["error"]["message"]) == (status, True), answer
        found, _ = await world.post({"prompt": "hi", "max_tokens": 2}, COMPLETIONS)
        assert found == 200


def test_a_package_that_templates_need_is_missed_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = with_template(tmp_path / "model", "{{ messages }}")
    settings = checkpoint / "tokenizer_config.json"
    # A setting that only `transformers` knows.
    settings.write_text(json.dumps(json.loads(settings.read_bytes()) | {"add_bos_token": False}))

    def refuse(*_: object, **__: object) -> str:
        raise ImportError("apply_chat_template requires jinja2 to be installed.")

    tokenizer = transformers.PreTrainedTokenizerBase
    monkeypatch.setattr(tokenizer, "apply_chat_template", refuse)
    with pytest.raises(ConfigError, match=r"chats cannot be rendered: .* jinja2"):
        PromptMaker(str(checkpoint))


def test_a_package_that_a_tokenizer_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))

    def refuse(*_: object, **__: object) -> object:
        raise ImportError("\nKimiTokenizer requires tiktoken\n")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(ConfigError, match=r"no tokenizer for model.path .* requires tiktoken"):
        PromptMaker(str(tmp_path))
