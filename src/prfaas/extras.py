"""Packages beyond those of a bare install, and the extra of the project that installs them."""

from __future__ import annotations

import importlib.util
import sys

from prfaas.errors import ConfigError

EXTRAS = {
    "gateway": ("numpy", "fastokens", "jinja2", "transformers", "zmq"),
    "codecs": ("numpy", "numba"),
    "mooncake": ("mooncake",),
    "plan": ("numpy", "scipy", "joblib", "plotext"),
    "ray": ("ray", "joblib"),
    "s3": ("obstore.store",),
    "tracing": ("opentelemetry.sdk", "opentelemetry.exporter"),
    "vllm": ("vllm", "torch"),
}
"""Modules that each extra adds, of those that are imported by name."""


def is_installed(module: str) -> bool:
    """Return True if a module can be imported."""
    if sys.modules.get(module, module) is None:  # it may not be imported
        return False
    package = module.rpartition(".")[0]
    found = not package or is_installed(package)
    return found and importlib.util.find_spec(module) is not None


def missing(what: str, extra: str) -> str | None:
    """Return a sentence with the command that installs an extra; None if all of it is installed.

    Args:
        what: What needs it, the sentence's subject.
    """
    absent = [module for module in EXTRAS[extra] if not is_installed(module)]
    if not absent:
        return None
    names = ", ".join(dict.fromkeys(module.partition(".")[0] for module in absent))
    return f"{what} needs {names}, not installed here: pip install 'prfaas[{extra}]'"


def require(what: str, extra: str) -> None:
    """Raise `ConfigError` with the command if an extra is not installed."""
    if (sentence := missing(what, extra)) is not None:
        raise ConfigError(sentence)


def extra_of(module: str) -> str | None:
    """Return an extra that installs a module that was not found; None if none does."""
    package = module.partition(".")[0]
    for extra, modules in EXTRAS.items():
        if package in (each.partition(".")[0] for each in modules):
            return extra
    return None
