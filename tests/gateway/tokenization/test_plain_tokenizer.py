"""Checkpoints read without `transformers`, exactly as it reads them, or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from prfaas.errors import RequestError
from prfaas.gateway.openai.requests import ClientRequest
from prfaas.gateway.tokenization.chat_renderer import ChatRenderer, compared_chats
from prfaas.gateway.tokenization.plain_tokenizer import plain_tokenizer
from prfaas.gateway.tokenization.text_encoder import bounds_of
from tests.gateway.conftest import CHAT_TEMPLATE
from tests.gateway.tokenizer_zoo import CORPUS, MARKERS, ZOO, tokenizer

TEXTS = [*CORPUS[:3], f"{MARKERS[0]}user\nHi{MARKERS[1]} the cat <mask> x", "  \n 12345 ", ""]
TEMPLATES = {
    "printing": CHAT_TEMPLATE,
    "taking parts": "{{ bos_token }}{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson(indent=2) }}{% endif %}{% endfor %}"
    "{{ tools | tojson(False, None, (',', ':')) }}{{ eos_token }}{{ enable_thinking }}",
    "refusing": "{{ raise_exception('no') }}",
}
CONFIG: dict[str, Any] = {"model_type": "llama", "vocab_size": 700, "transformers_version": "4.5"}
NEVER = (
    *("transformers", "torch", "scipy", "matplotlib", "plotly", "pandas", "numba"),
    *("huggingface_hub", "sentencepiece", "PIL", "httpx", "requests", "vllm", "ray"),
)
FILE = """
state = "{state}"
model = {{ name = "tiny", path = "{model}" }}
gateway = {{ listen = "127.0.0.1:0" }}
routing = {{ offload_threshold = 100 }}
security = {{ identities = "{identities}" }}
clusters.pd = {{ role = "pd", pools = {{ p = {{}} }}, engines = {{ e = {{ pool = "p" }} }} }}
"""
START = """
import json, sys
from pathlib import Path
from prfaas.cli.parts.gateway_annexes import make_gateway
from prfaas.config.addresses import Endpoints
from prfaas.config.load import load_deployment
where = Endpoints({"e": "http://127.0.0.1:1"}, {"p": ("127.0.0.1", 1)})
make_gateway(load_deployment(Path(sys.argv[1])), where)
print(json.dumps(sorted(name for name, found in sys.modules.items() if found is not None)))
"""


def write(path: Path, name: str = "qwen", template: str | None = CHAT_TEMPLATE) -> Path:
    known = tokenizer(name)
    known.chat_template = template
    known.eos_token = MARKERS[1]
    known.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def change(path: Path, **settings: Any) -> None:
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | settings))


def rendered(renderer: ChatRenderer, chat: ClientRequest) -> str:
    try:
        return renderer.render(chat)
    except RequestError:
        return "refused"


@pytest.mark.parametrize("name", ZOO)
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    found = plain_tokenizer(write(tmp_path, name))
    assert found is not None
    plain, config = found
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert config["vocab_size"] == CONFIG["vocab_size"]
    assert len(plain) == len(theirs)
    assert plain.get_vocab() == theirs.get_vocab()
    assert bounds_of(plain) == bounds_of(theirs)
    for text in TEXTS:
        for special in (False, True):
            ids = plain.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
        assert plain.decode(ids) == theirs.decode(ids)
        assert plain.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("takes_parts", [False, True])
def test_chats_are_those_of_transformers(tmp_path: Path, template: str, takes_parts: bool) -> None:
    found = plain_tokenizer(write(tmp_path, template=TEMPLATES[template]))
    assert found is not None
    ours, theirs = ChatRenderer(found[0]), ChatRenderer(AutoTokenizer.from_pretrained(tmp_path))
    ours.takes_parts = theirs.takes_parts = takes_parts
    texts = [(rendered(ours, chat), rendered(theirs, chat)) for chat in compared_chats("m")]
    assert [own for own, _ in texts] == [other for _, other in texts]
    assert template == "refusing" or sum(own != "refused" for own, _ in texts) > 5


OTHERS: dict[str, dict[str, Any]] = {
    "its class": {"tokenizer_class": "LlamaTokenizerFast"},
    "a bos": {"add_bos_token": True},
    "a prefix": {"add_prefix_space": True},
    "cleaned up": {"clean_up_tokenization_spaces": True},
    "code": {"auto_map": {"AutoTokenizer": ["a.B", None]}},
    "a new token": {"pad_token": "<other>"},
    "a token that is not special": {"pad_token": "the"},
    "a further token": {"extra_special_tokens": ["<more>"]},
    "other flags": {
        "added_tokens_decoder": {"1": {"content": "x", "lstrip": True, "special": True}}
    },
    "templates": {"chat_template": [{"name": "default", "template": "x"}]},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings_take_transformers(tmp_path: Path, name: str) -> None:
    write(tmp_path, template=None)
    assert plain_tokenizer(tmp_path) is not None
    change(tmp_path, **OTHERS[name])
    assert plain_tokenizer(tmp_path) is None


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_checkpoint_without_its_files_takes_transformers(tmp_path: Path, missing: str) -> None:
    (write(tmp_path) / missing).unlink()
    assert plain_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    "model_type", sorted(tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS)
)
def test_no_model_type_has_another_class(tmp_path: Path, model_type: str) -> None:
    """`transformers` overrules the class that these models name."""
    write(tmp_path, "bytes")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": model_type}))
    registered = tokenization_auto.TOKENIZER_MAPPING_NAMES.get(model_type) or ""
    if registered.removesuffix("Fast") not in ("", "TokenizersBackend", "PreTrainedTokenizer"):
        assert plain_tokenizer(tmp_path) is None


def test_modules_of_a_gateway_that_starts(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """A count of its start: `transformers` alone would be 480 modules, and 1.3 s of CPU time."""
    file = tmp_path / "file.toml"
    file.write_text(FILE.format(state=tmp_path, model=checkpoint, identities=identities))
    out = subprocess.run(
        [sys.executable, "-c", START, str(file)], stdout=subprocess.PIPE, text=True, check=True
    )
    names = json.loads(out.stdout)
    assert not {name.partition(".")[0] for name in names} & set(NEVER)
    assert len(names) < 1000
