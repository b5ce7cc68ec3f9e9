"""The demo's table at the widths that terminals have."""

import pytest

from prfaas.cli.deploy.demo_table import DemoRequest, DemoRow, table_of
from prfaas.presentation import console_for

from .demo_rows import RECORD, printed_at

LOCAL = RECORD | {"path": "local", "explanation": "short: 9 new tokens", "reason": "short"}
FALLBACK = LOCAL | {"fallback": {"stage": "transfer", "reason": "timeout"}}
TITLE = "  a question on the 12K"


def rows() -> list[DemoRow]:
    found = [DemoRow(DemoRequest(TITLE, ""), [], "a", each) for each in (RECORD, LOCAL, FALLBACK)]
    found[0].alone, found[1].alone, found[2].alone = "a", "b", "a"
    return [*found, DemoRow(DemoRequest(TITLE, ""), [])]


def test_an_answer_that_an_engine_gives_from_its_own_cache_is_named_so() -> None:
    row = rows()[1]
    assert (row.is_identical, row.is_as_cached) == (False, False)
    row.again = "a"
    assert (row.is_identical, row.is_as_cached) == (False, True)


def printed(width: int) -> list[str]:
    return printed_at(table_of(rows(), width), width)


@pytest.mark.parametrize("width", [*range(40, 180)])
def test_path_and_whether_it_is_identical_are_shown_at_every_width(width: int) -> None:
    head, remote, local, fallback, pending = printed(width)
    assert "path" in head
    assert "as alone" in head
    assert "REMOTE" in remote
    assert "identical" in remote
    assert "local" in local
    assert "DIFFERS" in local
    assert "fell back" in fallback
    assert "identical" in fallback
    assert "…" in pending
    assert max(map(len, (head, remote, local, fallback, pending))) <= width


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_no_figure_is_cut(width: int) -> None:
    remote = printed(width)[1]
    for figure in ("100,230", "117.7 MiB", "23457 ms"):
        assert figure in remote
    assert TITLE.strip()[:9] in remote


def test_a_pipe_gets_the_whole_table(capsys: pytest.CaptureFixture[str]) -> None:
    console = console_for(176)
    console.print(table_of(rows(), console.width))
    _, remote, _, fallback, _ = capsys.readouterr().out.splitlines()
    for cell in ("112,134", "11,904", RECORD["explanation"], "12346 ms", "identical"):
        assert cell in remote
    assert "fell back  transfer timeout; short: 9" in fallback
