"""The alert rules, the table and the runbooks are those of the list of alarms."""

from __future__ import annotations

import yaml

from prfaas.incidents.alarm_kinds import Severity
from prfaas.incidents.alarm_list import ALARMS, BY_NAME
from prfaas.incidents.alert_rules import rules, table
from tests.gateway.alert_rules import ROOT, RULES

WRITE = "run: python -m prfaas.incidents.alert_rules > dashboards/alerts.yml"


def test_the_rules_are_written_from_the_list() -> None:
    assert RULES.read_text() == rules(), WRITE


def test_the_file_is_what_the_list_says() -> None:
    [group] = yaml.safe_load(rules())["groups"]
    found = {each["alert"]: each for each in group["rules"]}
    listed = {each.alert: each for each in ALARMS if each.rule is not None}
    assert found.keys() == listed.keys()
    for name, alarm in listed.items():
        assert alarm.rule is not None
        rule = found[name]
        assert (rule["expr"], rule["for"]) == (alarm.rule.expr, alarm.rule.after)
        assert (rule["labels"]["severity"] == "page") == (alarm.severity is Severity.PAGE)
        assert rule["annotations"]["description"].endswith(alarm.todo)
        assert rule["annotations"]["runbook"] == alarm.runbook


def test_every_alarm_can_be_seen_by_somebody_and_has_one_name() -> None:
    assert len(BY_NAME) == len(ALARMS)
    for alarm in ALARMS:
        assert alarm.condition or alarm.rule, alarm.name
        assert alarm.severity is not Severity.NOTE
        assert alarm.does.endswith("."), alarm.name
        assert alarm.todo.endswith("."), alarm.name


def test_the_documentation_has_the_table() -> None:
    page = (ROOT / "docs" / "console.md").read_text()
    assert table() in page, "run: python -m prfaas.incidents.alert_rules --table"


def test_every_alarm_has_a_runbook() -> None:
    folder = ROOT / "docs" / "runbooks"
    if not folder.is_dir():
        return
    for alarm in ALARMS:
        assert (ROOT / alarm.runbook).is_file(), f"write {alarm.runbook}"
