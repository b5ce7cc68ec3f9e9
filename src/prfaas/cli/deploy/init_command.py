"""`prfaas init`: commented files to start from."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import click

from prfaas.errors import ConfigError
from prfaas.limited_files import SHIPPED_ROOT

_EXAMPLES = "examples/"
_CASE_STUDY = (
    "examples/plan/paper-case-study.toml",
    "examples/plan/profiles/paper-8xh20-1t.toml",
    "examples/plan/profiles/paper-8xh200-1t.toml",
)


@dataclass(frozen=True, slots=True)
class Kit:
    """Files for one purpose."""

    what: str
    """Content, for the help."""
    files: tuple[str, ...]
    """Shipped files and folders; those of `examples` are written without that folder."""
    then: str
    """Next command."""
    needs: str = ""
    """Requirements beyond prfaas; "" for none."""


KITS = {
    "laptop": Kit(
        "two clusters of vLLM engines on one machine without a GPU",
        ("examples/laptop.toml",),
        "prfaas up laptop.toml",
        "vLLM and 7 GB of free memory",
    ),
    "timing": Kit(
        "the same with timing engines, which compute nothing",
        ("examples/timing.toml", *_CASE_STUDY),
        "prfaas up timing.toml",
    ),
    "two-sites": Kit(
        "vLLM on GPUs at two sites",
        ("examples/two-sites.toml", "examples/prometheus.yml", "dashboards"),
        "prfaas check two-sites.toml",
        "your addresses in two-sites.toml",
    ),
    "kubernetes": Kit(
        "the Helm chart, and values of two sites",
        ("examples/kubernetes", "deploy/helm", "dashboards"),
        "helm template pd deploy/helm/prfaas --values kubernetes/pd-values.yaml",
        "helm",
    ),
    "plan": Kit(
        "a plan of a deployment, with profiles of its engines",
        _CASE_STUDY,
        "prfaas plan plan/paper-case-study.toml",
    ),
    "simulate": Kit(
        "a scenario: a link that is cut for a minute",
        ("examples/sim/link-cut.toml", *_CASE_STUDY),
        "prfaas simulate sim/link-cut.toml",
    ),
}


@click.command(
    epilog="\b\n" + "\n".join(f"{name:<12}{kit.what}" for name, kit in KITS.items()),
)
@click.argument("kit", type=click.Choice(list(KITS)))
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
def init(kit: str, *, force: bool) -> None:
    """Write commented files of an example into this folder, and print the next command.

    The examples are those of prfaas itself: `prfaas up timing` runs one where it is installed.

    \b
    Examples:
      prfaas init timing
      prfaas init plan --force
    """
    chosen = KITS[kit]
    texts = _texts(chosen.files)
    taken = sorted(str(path) for path, text in texts.items() if _differs(path, text))
    if taken and not force:
        raise ConfigError(
            f"{', '.join(taken)} {'exists' if len(taken) == 1 else 'exist'} already, and nothing "
            "was written; go to an empty folder, or overwrite with --force"
        )
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}; go to a folder of yours"
            ) from None
    folders = Counter(path.parent if path.parent.parts else path for path in texts)
    for place, count in folders.items():
        click.echo(f"wrote {place}{f': {_many(count)}' if place not in texts else ''}")
    needs = f"   (needs {chosen.needs})" if chosen.needs else ""
    click.echo(f"next: {chosen.then}{needs}")


def _many(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _differs(path: Path, text: str) -> bool:
    """Return True if there is something else at a path than the file to write."""
    try:
        return path.read_bytes() != text.encode()
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _texts(names: tuple[str, ...]) -> dict[Path, str]:
    """Files to write, by their path here. References to one another lead to where they are."""
    sources = [file for name in names for file in _files(SHIPPED_ROOT / name)]
    shipped_names = [file.relative_to(SHIPPED_ROOT).as_posix() for file in sources]
    ours = re.compile("|".join(re.escape(name) for name in shipped_names))
    return {
        Path(name.removeprefix(_EXAMPLES)): ours.sub(
            lambda found: found[0].removeprefix(_EXAMPLES), file.read_text(encoding="utf-8")
        )
        for name, file in zip(shipped_names, sources, strict=True)
    }


def _files(path: Path) -> list[Path]:
    """The file, or all files of a folder, without those that Python makes of its own."""
    if path.is_file():
        return [path]
    return sorted(f for f in path.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
