"""The list of all alarms: the console's alarms, the alert rules of Prometheus and the table of the
documentation come from it.

An alarm that the gateway can see has a `condition`, and is shown in the console (`rules.py`). One
that Prometheus can see has a `rule`, and is an alert in `dashboards/alerts.yml`
(`alert_rules.py`). Most have both.
"""

from __future__ import annotations

from prfaas.incidents.alarm_kinds import AlarmKind, AlertRule, Kind, Severity

_PAGE, _CRITICAL, _WARNING = Severity.PAGE, Severity.CRITICAL, Severity.WARNING

ALARMS = (
    AlarmKind(
        "requests_fail",
        Kind.REQUESTS,
        _PAGE,
        "more than 1 % of the requests of 5 minutes, 20 or more, failed",
        "Each was answered with a 5xx, or with an error in its stream.",
        "`prfaas ctl status` shows engines and links; the gateway's log has a line with request_id "
        "for each.",
        AlertRule(
            'sum(rate(prfaas_requests_total{outcome="failed"}[5m]))'
            " / sum(rate(prfaas_requests_total[5m])) > 0.01",
            "2m",
            "More than 1 % of requests fail",
            "{{ $value | humanizePercentage }} of requests end with a 5xx or an error in their "
            "stream.",
        ),
    ),
    AlarmKind(
        "process_down",
        Kind.GATEWAY,
        _PAGE,
        "",
        "Requests continue without a pool node or a PrfaaS engine, but not without the gateway.",
        "Start it again; its log has the reason of its end.",
        AlertRule(
            'up{job=~"prfaas.*"} == 0',
            "1m",
            "{{ $labels.job }} at {{ $labels.instance }} does not answer",
            "Its /metrics cannot be scraped. Requests continue without a pool node or a PrfaaS "
            "engine, but not without the gateway.",
        ),
    ),
    AlarmKind(
        "no_engine",
        Kind.ENGINE,
        _PAGE,
        "no engine of the PD cluster is ready",
        "Every request is answered with 503.",
        "Check the engines' logs and /health?full=1 of the gateway.",
        AlertRule(
            '(sum(prfaas_engine_ready{role="pd"}) or sum(prfaas_requests_in_flight) * 0) == 0',
            "1m",
            "No engine of the PD cluster is ready",
            "Every request is answered with 503.",
            "The second term is 0 where a gateway runs and lists no PD engine.",
        ),
    ),
    AlarmKind(
        "engine_down",
        Kind.ENGINE,
        _CRITICAL,
        "an engine does not answer, or does not serve the model",
        "It gets no new requests; those that it had go to other engines.",
        "Look at its log and start it again; `prfaas ctl status` has the reason.",
        AlertRule(
            "prfaas_engine_ready == 0",
            "5m",
            "Engine {{ $labels.engine }} is not ready",
            "It does not answer /health, or does not serve the model. Other engines take its "
            "requests.",
        ),
    ),
    AlarmKind(
        "engine_detached",
        Kind.ENGINE,
        _CRITICAL,
        "an engine is ready, and its pool node does not know it",
        "It serves, and nothing is offloaded to it or from it.",
        "See that it was started with the connector and the socket of its pool node; the logs of "
        "both have the reason.",
        AlertRule(
            "prfaas_engine_detached == 1",
            "2m",
            "Engine {{ $labels.engine }} is not connected to its pool node",
            "It serves, and nothing is offloaded to it or from it.",
        ),
    ),
    AlarmKind(
        "pool_silent",
        Kind.POOL,
        _CRITICAL,
        "the event stream of a pool node is not connected",
        "Nothing is offloaded to or from it, and its cached prefixes count as hints only.",
        "See that it runs and that the gateway reaches its address; its log and the gateway's have "
        "the reason.",
        AlertRule(
            "prfaas_pool_connected == 0",
            "2m",
            "Pool {{ $labels.pool }} is not connected",
            "Nothing is offloaded to or from it, and its cached prefixes count as hints only.",
        ),
    ),
    AlarmKind(
        "certificate_refused",
        Kind.CERTIFICATE,
        _CRITICAL,
        "an engine or a pool node shows a certificate that the gateway does not accept, or refuses "
        "the gateway's",
        "It counts as down: requests go elsewhere, and nothing is sent to it.",
        "Give both ends certificates of the same authority with the names of the deployment file; "
        "`prfaas check` names the wrong one.",
    ),
    AlarmKind(
        "identity_ends",
        Kind.CERTIFICATE,
        _WARNING,
        "the gateway's certificate, or its authority's, ends within 30 days",
        "Until then everything works; after that peers refuse its connections.",
        "docs/operations.md has the steps of a renewal without downtime.",
        AlertRule(
            "prfaas_gateway_identity_ends_timestamp_seconds - time() < 30 * 86400"
            " or prfaas_pool_identity_ends_timestamp_seconds - time() < 30 * 86400",
            "1h",
            "The certificate of {{ $labels.job }} at {{ $labels.instance }} ends soon",
            "After that peers refuse its connections, and nothing is offloaded.",
        ),
    ),
    AlarmKind(
        "link_down",
        Kind.LINK,
        _CRITICAL,
        "a link is down while both of its pool nodes answer",
        "Long prompts are prefilled locally or through another link.",
        "The logs of both pool nodes have the reason; `prfaas link test` measures the path.",
        AlertRule(
            "prfaas_route_link_up == 0",
            "2m",
            "The link {{ $labels.source }} to {{ $labels.destination }} is down",
            "Long prompts are prefilled locally or through another link.",
        ),
    ),
    AlarmKind(
        "link_slow",
        Kind.LINK,
        _WARNING,
        "three busy seconds below half of its budget, or of its highest rate in the last hour",
        "Routes are predicted with the rate that is measured, so that fewer prompts are offloaded.",
        "`prfaas link test` measures the path; look for other traffic on it.",
    ),
    AlarmKind(
        "breaker_open",
        Kind.BREAKER,
        _WARNING,
        "the breaker of an engine or a link is open, or probes",
        "It gets nothing new for a while, then one request that probes.",
        "Its log has the failures; `prfaas ctl decisions` shows when the breaker opened.",
        AlertRule(
            'prfaas_breaker_state{state="open"} == 1',
            "5m",
            "The breaker of {{ $labels.target }} is open",
            "Too many of its requests failed, and it gets nothing new.",
        ),
    ),
    AlarmKind(
        "fallbacks",
        Kind.REQUESTS,
        _WARNING,
        "more than 10 % of the offloaded requests of 5 minutes, 5 or more, fell back",
        "They were prefilled locally: later, and without an error.",
        "prfaas_fallback_total has stage and reason; docs/failures.md explains them.",
        AlertRule(
            'sum(rate(prfaas_fallback_total{stage!="decode", reason!="refused"}[10m])'
            ' or rate(prfaas_fallback_total{stage="transfer"}[10m]))'
            ' / sum(rate(prfaas_route_decisions_total{path="remote"}[10m])) > 0.05',
            "5m",
            "More than 5 % of offloaded requests fall back",
            "{{ $value | humanizePercentage }} of them were prefilled locally, not counting "
            "requests whose fields an engine refuses.",
        ),
    ),
    AlarmKind(
        "nothing_offloaded",
        Kind.REQUESTS,
        _WARNING,
        "20 or more requests in 5 minutes, 40 % of them longer than the threshold, none offloaded",
        "All of them are prefilled in the PD cluster.",
        "/health?full=1 of the gateway names missing parts; `prfaas ctl explain` has the reason "
        "for each request.",
        AlertRule(
            "sum(rate(prfaas_route_decisions_total{reason=~"
            '"link_down|link_barred|pool_draining|pool_not_connected|engine_not_connected'
            '|no_prefill_instance|layout_mismatch"}[15m])) > 0'
            ' and sum(rate(prfaas_route_decisions_total{path="remote"}[15m])) == 0',
            "15m",
            "Long prompts arrive, and none is offloaded",
        ),
    ),
    AlarmKind(
        "no_kv_bytes",
        Kind.REQUESTS,
        _CRITICAL,
        "5 or more requests were offloaded in 5 minutes, and no KV bytes arrived",
        "Decode computes the prompts that did not arrive.",
        "`prfaas ctl explain` of one of them shows its transfer; compare the engines' arguments "
        "with the connector's.",
    ),
    AlarmKind(
        "layout_mismatch",
        Kind.ENGINE,
        _CRITICAL,
        "the PD cluster cannot use the KV blocks of an engine; names the facts that differ",
        "Nothing is offloaded to it; requests stay local.",
        "Start both engines with the same model, arguments and environment; /health?full=1 and "
        "`prfaas ctl status` name what differs.",
        AlertRule(
            "prfaas_layout_mismatch > 0",
            "5m",
            "The KV blocks of engine {{ $labels.engine }} cannot be used by the PD cluster",
            "Its model, arguments or environment differ in {{ $value }} facts, and requests stay "
            "local.",
        ),
    ),
    AlarmKind(
        "index_incomplete",
        Kind.POOL,
        _WARNING,
        "the index of a connected pool is not `exact`",
        "Cached prefixes may be missed, and are computed again.",
        "It ends with the next snapshot; if it stays, look at the pool node's log.",
    ),
    AlarmKind(
        "membership_old",
        Kind.MEMBER,
        _WARNING,
        "the list of members is old: its source does not answer, or its change was refused",
        "The last good list stays in use.",
        "/health?full=1 and the log of the process have the reason.",
        AlertRule(
            "prfaas_membership_fault == 1 or prfaas_pool_membership_fault == 1",
            "5m",
            "{{ $labels.instance }} follows an old list of members from {{ $labels.source }}",
            "The source cannot be read or its change was refused, so parts that came or went are "
            "not known.",
        ),
    ),
    AlarmKind(
        "member_refused",
        Kind.MEMBER,
        _WARNING,
        "an engine or a pool node is listed and contradicts the site; names the reason",
        "It gets no requests and no transfers.",
        "/health?full=1 and the log of the process name each and the reason; correct its entry.",
        AlertRule(
            "prfaas_members_refused > 0 or prfaas_pool_members_refused > 0",
            "5m",
            "{{ $labels.instance }} refuses {{ $value }} listed members: {{ $labels.reason }}",
            "They get no requests and no transfers.",
        ),
    ),
    AlarmKind(
        "backlog_grows",
        Kind.LINK,
        _WARNING,
        "",
        'Prompts that would wait too long are prefilled locally, with `policy` "adaptive".',
        "More is sent over the link than it carries. Raise its budget or the threshold, or enable "
        "the short-term loop.",
        AlertRule(
            "prfaas_route_link_promised_bytes"
            " / (prfaas_route_link_goodput_bytes_per_second > 0) > 10",
            "5m",
            "More than 10 s of KV cache wait for {{ $labels.source }} to {{ $labels.destination }}",
        ),
    ),
    AlarmKind(
        "predictions_off",
        Kind.PLAN,
        _WARNING,
        "TTFTs of a path differ by a factor from predictions that were corrected already",
        "`ttft_max` does not use these predictions.",
        "Measure again with `prfaas profile`, and plan again.",
        AlertRule(
            "histogram_quantile(0.5, sum by (path, le)"
            " (rate(prfaas_ttft_over_predicted_ratio_bucket[30m]))) > 2"
            " or histogram_quantile(0.5, sum by (path, le)"
            " (rate(prfaas_ttft_over_predicted_ratio_bucket[30m]))) < 0.5",
            "30m",
            "TTFTs of the {{ $labels.path }} path are {{ $value | humanize }} times the predicted "
            "ones",
            "Predictions are wrong even after their correction, and ttft_max does not use them.",
        ),
    ),
    AlarmKind(
        "plan_does_not_fit",
        Kind.PLAN,
        _WARNING,
        "TTFTs of a path are below half or above twice the predictions of the plan",
        "Predictions are corrected by this factor; threshold and split of the plan are not.",
        "Measure with `prfaas profile`, and plan again.",
        AlertRule(
            "prfaas_prediction_correction_ratio > 2 or prfaas_prediction_correction_ratio < 0.5",
            "15m",
            "The plan does not match {{ $labels.cluster }}: the {{ $labels.path }} path takes "
            "{{ $value | humanize }} times as long",
            "Predictions are corrected by this factor, the threshold and the split of the plan are "
            "not.",
        ),
    ),
    AlarmKind(
        "plan_bytes_off",
        Kind.PLAN,
        _WARNING,
        "prompts have less than half or more than twice the KV bytes of the plan",
        "Predictions are corrected by this factor; the threshold of the plan is not.",
        "Name the model that is served in the plan, and plan again.",
        AlertRule(
            "prfaas_plan_bytes_correction_ratio > 2 or prfaas_plan_bytes_correction_ratio < 0.5",
            "15m",
            "Prompts have {{ $value | humanize }} times the KV bytes of the plan",
        ),
    ),
    AlarmKind(
        "refusals",
        Kind.ADMISSION,
        _WARNING,
        "requests are refused: their first token would be later than `ttft_max`, no engine could "
        "take them, or the gateway is full; ends 10 s after the last one",
        "They are answered with 429 or 503 at once, and may be sent again.",
        "Add instances, or change the threshold.",
        AlertRule(
            "sum(rate(prfaas_requests_refused_total[5m])) > 0",
            "10m",
            "Requests are refused",
            "Their first token would be later than ttft_max, or no engine could take them.",
        ),
    ),
    AlarmKind(
        "disk_tier_down",
        Kind.POOL,
        _WARNING,
        "",
        "The node continues with memory only.",
        "Its disk is full or failed; the pool node's log has the error.",
        AlertRule(
            "prfaas_pool_disk_up == 0 and on (instance) "
            'prfaas_pool_capacity_bytes{tier="disk"} > 0',
            "5m",
            "The disk tier of {{ $labels.instance }} accepts no blocks",
            "The node continues with memory only.",
        ),
    ),
    AlarmKind(
        "shared_tier_down",
        Kind.POOL,
        _WARNING,
        "",
        "Its blocks are misses; the node continues with memory and disk.",
        "The pool node's log has the error.",
        AlertRule(
            'prfaas_pool_shared_up == 0 and on (instance) prfaas_pool_blocks{tier="shared"} >= 0',
            "5m",
            "The shared tier of {{ $labels.instance }} fails",
            "Its blocks are misses; the node continues with memory and disk.",
        ),
    ),
    AlarmKind(
        "shared_tier_unreadable",
        Kind.POOL,
        _WARNING,
        "",
        "These objects are misses, and are computed again.",
        "unknown_key: its file of keys lacks one that other pool nodes use. altered: somebody "
        "changed or replaced objects.",
        AlertRule(
            "increase(prfaas_pool_shared_unreadable_total[10m]) > 0",
            "0m",
            "{{ $labels.instance }} skips objects in the shared tier ({{ $labels.reason }})",
        ),
    ),
    AlarmKind(
        "tickets_refused",
        Kind.POOL,
        _WARNING,
        "",
        "The transfers do not begin; these prompts are prefilled locally.",
        "expired and too_long: clocks differ; unknown_signer: a gateway that is not listed; "
        "no_room: the pool is too small for its transfers.",
        AlertRule(
            "sum by (instance, reason) (rate(prfaas_tickets_refused_total[10m])) > 0",
            "10m",
            "{{ $labels.instance }} refuses transfers: {{ $labels.reason }}",
        ),
    ),
    AlarmKind(
        "blocks_altered",
        Kind.POOL,
        _PAGE,
        "",
        "The source of altered blocks is barred, and its blocks are purged.",
        "Find the cause before its engines are resumed.",
        AlertRule(
            'increase(prfaas_verifications_total{outcome=~"altered|unattributed"}[1h]) > 0',
            "0m",
            "{{ $labels.instance }} received altered blocks",
            "The event source_barred in its log names the source that was barred. After the event "
            "altered_blocks_unattributed no source is barred.",
        ),
    ),
    AlarmKind(
        "verification_evaded",
        Kind.POOL,
        _PAGE,
        "",
        "Nothing: the source stays in use.",
        "Drain its engines, and compare its blocks.",
        AlertRule(
            "increase(prfaas_verification_suspicions_total[1h]) > 0",
            "0m",
            "{{ $labels.instance }}: verification does not reach a source: {{ $labels.reason }}",
            "The event source_suspect in its log names the source. not_committed: it stops "
            "transfers of which all blocks have arrived; unknown: most of its transfers cannot be "
            "compared.",
        ),
    ),
    AlarmKind(
        "audit_not_written",
        Kind.GATEWAY,
        _PAGE,
        "",
        'With on_full = "closed" it accepts no transfers and no changes.',
        "Its disk is full or failed: make room. The log of the process has the error.",
        AlertRule(
            "prfaas_pool_audit_failing == 1 or prfaas_gateway_audit_failing == 1",
            "1m",
            "{{ $labels.instance }} cannot write its audit log",
            'With on_full = "closed" it accepts no transfers and no changes.',
        ),
    ),
    AlarmKind(
        "audit_lost",
        Kind.GATEWAY,
        _PAGE,
        "",
        "The gap is on record.",
        "The audit log could not be written for longer than its memory lasts. `prfaas audit "
        "verify` shows the gap.",
        AlertRule(
            "increase(prfaas_pool_audit_lost_records_total[10m]) > 0"
            " or increase(prfaas_gateway_audit_lost_records_total[10m]) > 0",
            "0m",
            "{{ $labels.instance }} lost audit records",
        ),
    ),
    AlarmKind(
        "incidents_not_written",
        Kind.GATEWAY,
        _WARNING,
        "the log of incidents cannot be written",
        "Requests are served as before; the last incidents stay in memory until they can be "
        "written.",
        "Make room on the disk of the deployment's `state` directory; the gateway's log has the "
        "error.",
        AlertRule(
            "prfaas_gateway_incidents_failing == 1",
            "5m",
            "{{ $labels.instance }} cannot write its log of incidents",
            "Requests are served as before, and a restart would forget the last incidents.",
        ),
    ),
    AlarmKind(
        "restart_due",
        Kind.OPERATOR,
        _WARNING,
        "the deployment file was changed in what a gateway reads at its start only",
        "The settings of its start stay in use; members are followed.",
        "Restart the gateway, or undo the change.",
    ),
    AlarmKind(
        "loops_frozen",
        Kind.OPERATOR,
        _WARNING,
        "the control loops have been frozen for an hour",
        "Thresholds and roles do not follow the load.",
        "`prfaas ctl unfreeze` resumes the loops.",
        AlertRule(
            "prfaas_loops_frozen == 1",
            "1h",
            "The control loops have been frozen for an hour",
            "Thresholds and roles do not follow the load.",
        ),
    ),
)
"""All of them; the worst of a moment is shown first."""

BY_NAME = {each.name: each for each in ALARMS}
