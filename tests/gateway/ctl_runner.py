"""`prfaas ctl` in this process, beside a gateway."""

from __future__ import annotations

import asyncio

from click.testing import CliRunner, Result

from prfaas.cli.operate.ctl_command import ctl


async def run(*words: str, url: str) -> Result:
    """The command in a thread of its own: the gateway runs in this one."""
    return await asyncio.to_thread(CliRunner().invoke, ctl, [*words, "--url", url])
