"""Documentation is held to the code."""

import ast
import re
import runpy
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from click import Context

from prfaas.cli.main import COMMANDS, cli
from prfaas.cli.reference import reference as commands
from prfaas.config.reference import reference
from prfaas.core.dispatch.types import RefusalReason
from prfaas.core.request.blocks import POOL_DOWN, TIMEOUT, UNKNOWN
from prfaas.core.request.events import REASONS, DecodeFailure, PrefillFailure
from prfaas.core.request.machine import NOT_ASKED
from prfaas.core.request.watch import WatchAlarm
from prfaas.core.routing.decision import Reason
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.errors import ERROR_TYPES
from prfaas.sim.scenario.reference import reference as scenario_reference

ROOT = Path(__file__).parents[1]
NUM_WORDS_MAX = 100_000
LEVELS = [f"logging.{level}" for level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")]
PAGES = [
    page
    for folder in ("*", "docs/**/*", "examples/**/*", "tests/**/*", "deploy/**/*")
    for page in sorted(ROOT.glob(f"{folder}.md"))
]


def test_the_deployment_reference_is_written_from_the_types() -> None:
    page = (ROOT / "docs" / "deployment-file.md").read_text()
    assert page == reference(), "run: python -m prfaas.config.reference > docs/deployment-file.md"


def test_the_scenario_reference_is_written_from_the_types() -> None:
    page = (ROOT / "docs" / "scenario-file.md").read_text()
    assert page == scenario_reference(), (
        "run: python -m prfaas.sim.scenario.reference > docs/scenario-file.md"
    )


def test_the_command_reference_is_written_from_the_commands() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert page == commands(), "run: python -m prfaas.cli.reference > docs/cli.md"


def test_every_kind_of_error_of_the_gateway_is_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    rows = [f"| {status} | `{kind}` |" for status, kind in ERROR_TYPES.items()]
    assert not [row for row in rows if row not in page]


def test_every_reason_of_a_decision_is_documented() -> None:
    page = (ROOT / "docs" / "why.md").read_text()
    table = page.partition("## Why did my request go local")[2].partition("## ")[0]
    assert not {reason for reason in (*Reason, *RefusalReason) if f"`{reason.value}`" not in table}


def test_every_reason_of_a_fallback_is_documented_with_its_meaning() -> None:
    page = (ROOT / "docs" / "failures.md").read_text()
    table = page.partition("## Reasons of a fallback")[2].partition("## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", table, re.MULTILINE)
    told = {(stage, reason): text for stage, found, text in rows for reason in _quoted(found)}
    expected = {
        (stage, reason): text
        for stage, reasons in REASONS.items()
        for reason, text in reasons.items()
        if stage != "pull"
    }
    assert told == expected


def test_the_reasons_of_fallbacks_are_those_of_the_core() -> None:
    of_transfers = {*TransferEnd, POOL_DOWN, TIMEOUT, UNKNOWN, WatchAlarm.LATE} - {
        TransferEnd.COMMITTED
    }
    assert {stage: set(reasons) for stage, reasons in REASONS.items()} == {
        "prefill": {*PrefillFailure, TransferEnd.ENGINE_LOST, *WatchAlarm},
        "transfer": of_transfers,
        "decode": {*DecodeFailure},
        "pull": {*of_transfers, NOT_ASKED},
    }


def test_every_event_of_the_logs_is_documented() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    table = page.partition("### Events")[2].partition("## ")[0]
    listed = re.findall(
        r"^\| `(\w+)` \| (?:gateway|pool node|all parts) \| .+ \|$", table, re.MULTILINE
    )
    logged = {
        event
        for file in (ROOT / "src").rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        for event in _logged_events(call)
    }
    assert sorted(listed) == sorted(logged)


def _logged_events(call: ast.Call) -> Iterator[str]:
    """Yield the names of events: the arguments that follow a level, such as logging.INFO."""
    for level, event in pairwise(call.args):
        if ast.unparse(level) in ("level", *LEVELS):
            names = [event.body, event.orelse] if isinstance(event, ast.IfExp) else [event]
            yield from (
                name.value
                for name in names
                if isinstance(name, ast.Constant)
                and isinstance(name.value, str)
                and re.fullmatch(r"\w+", name.value)
            )


def _quoted(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^):]+)\)", page.read_text()):
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), target
        assert not anchor or anchor in _anchors(there), target


def test_pages_that_the_product_names_exist() -> None:
    """Errors, help texts, comments and charts refer to pages, some with a heading."""
    files = [
        file
        for folder in ("src", "deploy", "examples", "benchmarks", "tests", "dashboards")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".py", ".yaml", ".yml", ".toml", ".service", ".tpl", ".txt"}
    ]
    named = {
        (place, anchor)
        for file in (*files, ROOT / "pyproject.toml", ROOT / "Makefile")
        for place, anchor in re.findall(
            r"\b(docs/[\w/.-]+?\.md)(?:#([\w-]+))?", file.read_text(encoding="utf-8")
        )
    }

    assert len(named) > 20
    for place, anchor in sorted(named):
        assert (ROOT / place).exists(), place
        assert not anchor or anchor in _anchors(ROOT / place), f"{place}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """Headings of a page as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    ("contents", "pages"),
    [
        ("docs/README.md", "docs/*.md"),
        ("docs/results/index.md", "docs/results/*.md"),
        ("docs/runbooks/index.md", "docs/runbooks/*.md"),
    ],
)
def test_every_page_is_in_a_table_of_contents(contents: str, pages: str) -> None:
    there = ROOT / contents
    text = there.read_text()
    for page in ROOT.glob(pages):
        assert page == there or f"({page.name}" in text, page.name


def test_readme_and_documentation_are_at_most_100_000_words() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= NUM_WORDS_MAX


def test_the_glossary_is_written_from_its_terms() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "pages.py"))["glossary"]()
    page = (ROOT / "docs" / "glossary.md").read_text()
    assert page == written + "\n", "run: python docs/pages.py > docs/glossary.md"


def test_every_decision_has_a_number_of_its_own() -> None:
    files = sorted(path.name for path in ROOT.glob("docs/decisions/*.md"))
    numbers = [name.partition("-")[0] for name in files]
    assert len(set(numbers)) == len(files), files
    for name, number in zip(files, numbers, strict=True):
        heading = (ROOT / "docs" / "decisions" / name).read_text().partition("\n")[0]
        assert heading.startswith(f"# {int(number)}. "), name


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+) {2,}", (ROOT / "README.md").read_text()):
        assert f"\n{target}:" in makefile


def test_every_command_shows_examples() -> None:
    for name in COMMANDS:
        command = cli.get_command(Context(cli), name)
        assert command is not None
        assert "Examples:" in (command.help or ""), name
