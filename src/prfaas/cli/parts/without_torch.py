"""Tokenizers of `transformers` in a process that has no use for `torch`."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType
from typing import cast


def keep_torch_out() -> None:
    """Have imports of `torch` fail in this process, unless it is there already.

    `transformers` imports it with its tokenizers where it can, and does without it where it can
    not: 330 MB and three seconds of a core. Called by processes that only tokenise, before they
    import `transformers`; nothing in such a process can import `torch` afterwards.
    """
    if "torch" not in sys.modules:
        # `transformers` prints a line, among logs in JSON, where there is none.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        if importlib.util.find_spec("torch") is not None:
            # The import system takes None for "there is no such module".
            sys.modules["torch"] = cast(ModuleType, None)
