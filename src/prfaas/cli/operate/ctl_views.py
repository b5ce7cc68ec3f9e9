"""Output of `prfaas ctl` for people."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from prfaas.core.codec.codecs import Quality
from prfaas.core.transfer.link_encryption import LinkEncryption

Json = dict[str, Any]

_ROLES = {"prfaas": "prefill only", "pd": "prefill and decode"}
_OBSTACLES = {
    "not_offloadable": "a field that one engine alone serves",
    "nothing_to_ship": "less than a new KV block to ship",
    "link_down": "its link is down",
    "link_barred": "transfers over its link failed, and it is barred",
    "pool_draining": "a pool node takes no new transfers",
    "pool_not_connected": "a pool node does not answer the gateway",
    "engine_not_connected": "an engine is not connected to its pool node",
    "no_prefill_instance": "no engine there takes requests",
    "prompt_too_long": "the prompt is longer than its engines take",
    "layout_mismatch": "its KV cache has another layout than ours",
    "shared_cores": "its engine computes on the cores of the PD engine",
    "region": "the tenant may not be in a region of it",
    "link_limit": "the tenant has used its share of the links",
    "no_room": "its blocks do not fit into the PD pool with those in transit",
    "link_full": "the link has more to carry than it can in time",
}


SHOWN_RATIO = 1.005
"""Bytes of blocks for a transmitted byte, from which coding is worth a word."""


def status_lines(found: Json) -> list[str]:
    """Loops, links, clusters and engines, a line each."""
    loops = dict(found["loops"])
    frozen = loops.pop("frozen")
    on = [name for name, is_on in loops.items() if is_on]
    lines = [
        f"policy     {found['policy']}",
        f"loops      {'FROZEN' if frozen else 'running'}: {', '.join(on) or 'none configured'}",
    ]
    lines += [_prediction_line(each) for each in found.get("predictions", ())]
    # A gateway of an earlier version sends none.
    if bytes_ := found.get("plan_bytes"):
        lines.append(
            f"plan       bytes corrected by {bytes_['correction']:g}, "
            f"{bytes_['num_transfers']:,} transfers compared"
        )
    lines += [_price_line(each) for each in found.get("prices", ())]
    for link in found["links"]:
        state = "up" if link["is_up"] else "DOWN"
        lines.append(
            f"link       {link['source']}:{link['destination']}  {state}"
            f"{_threshold(link)}{_coding(link)}{_encryption(link)}"
        )
    for cluster in found["clusters"]:
        state = "on" if cluster["is_on"] else "OFF"
        lines.append(f"cluster    {cluster['name']}  {_ROLES[cluster['role']]}  {state}")
    for engine in found["engines"]:
        state = "ready" if engine["is_ready"] else "DOWN"
        drained = "  DRAINED" if engine["is_drained"] else ""
        role = f"  {engine['role']}" if engine["role"] else ""
        lines.append(
            f"engine     {engine['name']}  {engine['cluster']}{role}  {state}{drained}  "
            f"{engine['num_in_flight']} in flight"
        )
        # A gateway of an earlier version sends none.
        if why := engine.get("why_down"):
            lines.append(f"           {why}")
    lines += [f"pool       {p['name']}  {_live(p['is_live'])}" for p in found["pools"]]
    lines += _member_lines(found)
    # A gateway of an earlier version sends none.
    for each in found.get("layout_mismatches", ()):
        lines.append(f"MISMATCH   {each['engine']}, {each['reference']}  {each['words']}")
    return lines


def _member_lines(found: Json) -> list[str]:
    """Members that are not simply in use, and the sources of members; an earlier gateway has
    none."""
    lines = [
        f"source     {each['name']}  members as of {each['age_s']:.0f} s ago"
        + (f"  FAULT: {each['fault']}" if each["fault"] else "")
        + (f"  WAITS FOR A RESTART: {each['waits']}" if each.get("waits") else "")
        for each in found.get("member_sources", ())
    ]
    for each in found.get("members", ()):
        why = f"  {each['why']}" if each["why"] else ""
        lines.append(
            f"member     {each['name']}  {each['kind'] or 'unknown'}  "
            f"{each['state'].upper() if each['state'] == 'refused' else each['state']}  "
            f"for {each['age_s']:.0f} s  {each['address'] or ''}{why}".rstrip()
        )
    return lines


def _threshold(link: Json) -> str:
    """Threshold of a link; empty between hosts of a cluster, where it decides nothing."""
    tokens = link["offload_threshold"]
    by = ", set by the operator" if link.get("is_threshold_set") else ""
    return "" if tokens is None else f"  threshold {tokens:,} tokens{by}"


def _coding(link: Json) -> str:
    """Coding of a link; empty for raw blocks, or with an earlier gateway."""
    ratio = link.get("coding_ratio", 1.0)
    return f"  coding {ratio:.2f}x" if ratio >= SHOWN_RATIO else ""


def _encryption(link: Json) -> str:
    """Protection of the blocks on a link; empty if unknown, or with an earlier gateway."""
    encryption = link.get("encryption", "unknown")
    if encryption == LinkEncryption.NETWORK:
        return "  NOT ENCRYPTED (network)"
    return f"  {encryption}" if encryption != "unknown" else ""


def _prediction_line(found: Json) -> str:
    state = "proven" if found["is_proven"] else "OFF" if found["is_refuted"] else "unproven"
    return (
        f"predicted  {found['path']} path, {found['cluster']}  {state}  "
        f"corrected by {found['correction']:g}, typical error {found['error']:.2f}x, "
        f"{found['num_samples']:,} compared"
    )


def decision_line(entry: Json) -> str:
    """One entry of `/control/decisions`."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["at_unix_s"]))
    moved = ""
    if entry["new"] is not None:
        moved = f"  {_value(entry['old'])} -> {_value(entry['new'])}"
    what = f"{entry['loop']} {entry['action']}  {entry['what']}"
    return f"{at}  #{entry['number']}  {what}{moved}  ({entry['why']})"


def purge_lines(found: Json) -> list[str]:
    """Lines of a purge report, done or dry: one for each pool node and engine."""
    does = "has" if found["dry_run"] else "dropped"
    target = found["source"] or f"tenant {found['tenant']}"
    if found.get("request"):
        target = f"the prompt of {found['request']}"
    lines = []
    for pool in found["pools"]:
        amount = (
            f"{does} {pool['num_blocks']:,} blocks of {target}: "
            f"{pool['host_bytes']:,} bytes in memory, {pool['disk_bytes']:,} on disk"
        )
        if pool["shared_bytes"]:
            amount += f", {pool['shared_bytes']:,} in the tier of the site"
        lines.append(f"pool       {pool['name']}  {_problem(pool) or amount}")
    for engine in found["engines"]:
        lines.append(f"engine     {engine['name']}  {_problem(engine) or 'forgot all it held'}")
    if not found["is_complete"]:
        lines.append("NOT DONE: repair the parts above; the gateway repeats the purge")
    elif not found["dry_run"]:
        lines.append(f"done       nothing of {target} is left")
    return lines


def _problem(part: Json) -> str:
    return f"NOT DONE: {part['problem']}" if part["problem"] else ""


def explain_lines(found: Json) -> list[str]:
    """Print the decision on a request and its course."""
    lines = [f"request    {found['request_id']}  {found['outcome']}"]
    # A gateway of an earlier version sends none.
    if found.get("quality", Quality.LOSSLESS) != Quality.LOSSLESS:
        lines.append(f"quality    {found['quality']}: its blocks may be rounded on links")
    decision = found["decision"]
    if decision is None:
        return [*lines, "decision   none: it was refused, or is not decided yet"]
    lines += [
        f"decision   {decision['path'].upper()}: {decision['explanation']}",
        f"           {_hits(decision, found['num_prompt_tokens'])}",
    ]
    if decision["refusal"]:
        lines.append(f"refused    {decision['refusal']}")
    lines.append(f"predicted  {_predicted(decision)}")
    for way in found["clusters"]:
        lines += _way_lines(way)
    # A gateway of an earlier version sends none.
    lines += [_cost_line(each) for each in found.get("costs", ())]
    if found["candidates"]:
        lines.append("candidates (a score ranks the engines of one cluster, not the clusters)")
    lines += [_candidate_line(candidate) for candidate in found["candidates"]]
    return [*lines, *_happened_lines(found["happened"])]


def story_lines(found: Json) -> list[str]:
    """Print the steps of a request's state machine."""
    return [f"request    {found['request_id']}  {found['outcome']}"] + [
        f"{step['at_ms']:>10,.1f} ms  {step['event']:<18} {step['stage']:<12} "
        + ", ".join(step["actions"])
        for step in found["steps"]
    ]


def _hits(decision: Json, num_prompt_tokens: int) -> str:
    return (
        f"{num_prompt_tokens:,} prompt tokens; cached: {decision['pd_hit_tokens']:,} at home, "
        f"{decision['prfaas_hit_tokens']:,} away"
    )


def _predicted(decision: Json) -> str:
    """TTFTs, or the reason for their absence."""
    if decision["predicted_local_ms"] is None and decision["predicted_remote_ms"] is None:
        return f"nothing: {decision['not_predicted'] or 'the policy asked for no prediction'}"
    return _pair(decision, "predicted_local_ms", "predicted_remote_ms")


def _way_lines(way: Json) -> list[str]:
    obstacle = way["obstacle"]
    closed = f"  closed ({_OBSTACLES.get(obstacle, obstacle)})" if obstacle else ""
    backlog, rate = way["link_backlog_bytes"], way["link_bits_per_s"]
    link = "rate unknown then: no transfer had filled it for two round trips"
    if backlog is not None and rate is not None:
        link = f"{backlog:,} bytes waiting, {rate / 1e6:,.0f} Mbit/s, RTT {_ms(way['rtt_ms'])}"
    waits = _pair(way, "local_wait_ms", "remote_wait_ms")
    return [
        f"remote     {way['cluster']}{closed}  waits: {waits}",
        f"           link {way['link']}  {link}",
    ]


def _price_line(found: Json) -> str:
    leaves_in_s = found["leaves_in_s"]
    leaves = ""
    if leaves_in_s is not None:
        leaves = "  REVOKED" if leaves_in_s <= 0 else f"  leaves in {leaves_in_s:,.0f} s"
    spent = found["compute_cost"] + found["bytes_cost"]
    return (
        f"price      {found['cluster']}  {found['gpu_hour']:g} a GPU hour, {found['per_tb']:g} a "
        f"TB{leaves}  spent {spent:.4g} for {found['num_requests']:,} prefills"
    )


def _cost_line(found: Json) -> str:
    """A cluster that could have prefilled, with its cost or what excluded it."""
    mark = "*" if found["is_chosen"] else " "
    if found["excluded"]:
        return f"cost      {mark}{found['cluster']}  excluded: {found['excluded']}"
    return (
        f"cost      {mark}{found['cluster']}  {found['cost']:.6f} = compute "
        f"{found['compute']:.6f} + bytes {found['bytes']:.6f} + time {found['time']:.6f}"
    )


def _candidate_line(candidate: Json) -> str:
    state = f"dropped: {candidate['dropped']}" if candidate["dropped"] else _score(candidate)
    return (
        f"candidate  {candidate['engine']} ({candidate['where']})  {state}  "
        f"waits {_ms(candidate['wait_ms'])}, {candidate['hit_tokens']:,} tokens cached"
    )


def _score(candidate: Json) -> str:
    parts = " + ".join(f"{name} {score:.2f}" for name, score in candidate["scores"].items())
    return f"score {candidate['score']:.2f} = {parts}"


def _happened_lines(found: Json) -> list[str]:
    steps: list[tuple[str, str, Callable[[Json], str]]] = [
        ("decided", "decided_after_ms", lambda f: f"after {_ms(f['decided_after_ms'])}"),
        ("prefill", "prefill_ms", lambda f: f"{_ms(f['prefill_ms'])} on {f['prefill_engine']}"),
        ("transfer", "transfer_state", _transfer),
        ("pulled", "pulled_tokens", lambda f: f"{f['pulled_tokens']:,} tokens, not computed"),
        ("first token", "ttft_ms", _ttft),
        ("decode", "decode_engine", _decode),
        ("whole", "e2e_ms", lambda f: f"{_ms(f['e2e_ms'])}, {f['num_output_tokens']:,} tokens"),
        ("fell back", "fallback", lambda f: str(f["fallback"])),
    ]
    lines = [f"{name:<13}{text(found)}" for name, key, text in steps if found[key] is not None]
    return ["happened", *(f"  {line}" for line in lines)]


def _transfer(found: Json) -> str:
    size = f"{found['kv_bytes']:,} bytes in {_ms(found['transfer_ms'])}"
    return f"{found['transfer_state']}, {size}"


def _decode(found: Json) -> str:
    """The TTFT is known only for streams."""
    took = "" if found["decode_ms"] is None else f"{_ms(found['decode_ms'])} "
    return f"{took}on {found['decode_engine']}"


def _ttft(found: Json) -> str:
    predicted = found["predicted_ttft_ms"]
    against = f", predicted {_ms(predicted)}" if predicted is not None else ""
    # A gateway of an earlier version sends neither.
    if found.get("first_token_from") != "prefill":
        return f"after {_ms(found['ttft_ms'])}{against}"
    then = (
        "" if found["second_ms"] is None else f", then the second after {_ms(found['second_ms'])}"
    )
    early = f", from {found['prefill_engine']}: it need not wait for the transfer{then}"
    return f"after {_ms(found['ttft_ms'])}{against}{early}"


def _pair(found: Json, here: str, there: str) -> str:
    return f"{_ms(found[here])} local, {_ms(found[there])} remote"


def _ms(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.1f} ms"


def _value(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _live(is_live: bool) -> str:
    return "heard" if is_live else "NOT HEARD"


def joined(lines: Iterable[str]) -> str:
    """Lines as one text."""
    return "\n".join(lines)
