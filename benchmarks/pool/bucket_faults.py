"""Errors, wrong answers and delays of clients while a bucket fails under load.

python -m benchmarks.pool.shared_tier clients
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import aiohttp

from benchmarks.pool.shared_tier import settings_in
from prfaas.pool.shared.settings import S3Timing
from prfaas.wire.identity import make_authority, make_identity
from tests.engines.timing.site_of_hosts import site_of
from tests.engines.timing.tier_faults import HEAD, Outcome, under_load
from tests.gateway.conftest import make_checkpoint
from tests.s3.faulty import Fault, FaultyS3
from tests.s3.server import running_server

LAYOUT = {"pool-a": {"e0": "both"}, "pool-b": {"e1": "both"}}


async def clients(seconds: float = 8.0) -> None:
    """A client's time to first token through faults of the bucket."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    print(HEAD)
    with running_server() as port:
        for fault in Fault:
            async with FaultyS3(port).serving() as s3:
                out = await _under(fault, s3, seconds)
            print(out.row(fault.value, seconds), flush=True)
            print("\n".join(out.errors[:3]), end="")


async def _under(fault: Fault, s3: FaultyS3, seconds: float) -> Outcome:
    with tempfile.TemporaryDirectory() as text:
        place = Path(text)
        identities = place / "identities"
        make_authority(identities)
        make_identity(identities, "gateway")
        checkpoint = make_checkpoint(place / "checkpoint")
        async with aiohttp.ClientSession() as http, http.put(f"{s3.url}/{fault}"):
            pass
        settings = settings_in(place, s3.url, fault.value)
        # Blocks are written soon, and seen by the other host; limits of reads are the defaults.
        timing = S3Timing(refresh_s=0.1, flush_s=0.05)
        shared = replace(settings, deadline_ns=10**9, timing=timing)
        async with site_of(place, checkpoint, identities, LAYOUT, shared=shared) as world:

            def inject() -> None:
                s3.fault = fault

            out = await under_load(world, inject, seconds)
            s3.fault = None
        return out
