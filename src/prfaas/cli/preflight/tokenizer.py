"""Check for the gateway's tokenizer before the start."""

from __future__ import annotations

from pathlib import Path

from prfaas.config.deployment import Deployment
from prfaas.errors import ConfigError

_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)


def check_tokenizer(deployment: Deployment) -> None:
    """See that a checkpoint on this machine has a tokenizer.

    Raises:
        ConfigError: It has none: no request could be tokenised.
    """
    path = Path(deployment.model.path)
    if deployment.model.generate or not (path / "config.json").exists():
        return
    if any((path / name).exists() for name in _NAMES) or any(path.glob("*.tiktoken")):
        return
    raise ConfigError(
        f"no tokenizer at {path}: the gateway tokenises every prompt and needs {_NAMES[0]}, or one "
        f"of {', '.join(_NAMES[1:])}; copy it there from the source of the model"
    )
