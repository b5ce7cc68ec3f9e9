"""Writes the alert rules of Prometheus from the list of alarms, and the table of the documentation.

python -m prfaas.incidents.alert_rules > dashboards/alerts.yml
python -m prfaas.incidents.alert_rules --table
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from prfaas.incidents.alarm_kinds import AlarmKind, AlertRule, Severity
from prfaas.incidents.alarm_list import ALARMS

HEAD = """\
# Rules of Prometheus, written from the list of alarms: python -m prfaas.incidents.alert_rules
groups:
  - name: prfaas
    rules:
"""
COLUMNS = ("alarm", "alert of Prometheus", "shown in the console if")


def rules() -> str:
    """The file `dashboards/alerts.yml`."""
    found = [(each, each.rule) for each in ALARMS if each.rule is not None]
    return HEAD + "".join(line for each, rule in found for line in _lines(each, rule))


def _lines(alarm: AlarmKind, rule: AlertRule) -> Iterator[str]:
    severity = "page" if alarm.severity is Severity.PAGE else "ticket"
    yield f"      - alert: {alarm.alert}\n"
    if rule.note:
        yield f"        # {rule.note}\n"
    # A string of JSON is one of YAML.
    yield f"        expr: {json.dumps(rule.expr)}\n"
    yield f"        for: {rule.after}\n"
    yield f"        labels: {{severity: {severity}}}\n"
    yield "        annotations:\n"
    yield f"          summary: {json.dumps(rule.summary)}\n"
    yield f"          description: {json.dumps(f'{rule.means} {alarm.todo}'.strip())}\n"
    yield f"          runbook: {alarm.runbook}\n"


def table() -> str:
    """The table of all alarms in Markdown, for a page in `docs`."""
    rows = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for each in ALARMS:
        page = each.runbook.removeprefix("docs/")
        alert = f"`{each.alert}`" if each.rule is not None else "-"
        rows.append(f"| [{each.name}]({page}) | {alert} | {each.condition or '-'} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table() if "--table" in sys.argv[1:] else rules())
