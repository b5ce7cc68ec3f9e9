"""`prfaas up` with SGLang-like timing engines at two sites: processes, mutual TLS, a hand-off."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from prfaas.cli.deploy.topology import FILE_NAME
from tests.cli.conftest import Start
from tests.cli.running_parts import until
from tests.cli.started_commands import said
from tests.deployments import ROOT, placed

EXAMPLE = ROOT / "examples" / "sglang-timing.toml"
PROMPT = [number * number % 199 for number in range(5000)]
PAGE_TOKENS = 64


@pytest.mark.timeout(300)
def test_two_sites_of_sglang_like_engines_hand_over(start: Start, tmp_path: Path) -> None:
    file, _ = placed(EXAMPLE, tmp_path)
    process = start("up", file)
    until(lambda: "Ctrl-C stops everything" in said(tmp_path) or process.poll() is not None, 200)
    assert process.poll() is None, said(tmp_path)
    address = re.search(r"http://127\.0\.0\.1:\d+", said(tmp_path).split("ready at", 1)[1])
    assert address is not None
    url = address[0]
    body = {"model": "sglang-timing", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    remote = asked(f"{url}/v1/completions", body)
    [record] = asked(f"{url}/control/requests")["requests"]
    assert (record["path"], record["fallback"]) == ("remote", None)
    num_pages = (len(PROMPT) - 1) // PAGE_TOKENS
    assert record["transfer_state"] == "committed"
    assert record["kv_bytes"] % num_pages == 0 < record["kv_bytes"]
    # Once more: the pages are in the PD cluster, and the answer is the same.
    local = asked(f"{url}/v1/completions", body)
    assert local["choices"] == remote["choices"]
    cached = local["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == num_pages * PAGE_TOKENS
    found = json.loads((tmp_path / "state" / FILE_NAME).read_text())
    targets = {each["labels"]["part"]: each["targets"][0] for each in found}
    with urllib.request.urlopen(f"http://{targets['pd-0']}/metrics", timeout=30) as page:
        assert b"sglang:num_queue_reqs" in page.read()


def asked(url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)  # noqa: S310 (of this machine)
    with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310
        return json.loads(reply.read())
