"""Identities of a running deployment, renewed before they end."""

from __future__ import annotations

import asyncio
import datetime
import signal
from collections.abc import Callable

from prfaas.cli.deploy.topology import identity_names
from prfaas.cli.supervision.keeper import Phase
from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.config.deployment import Deployment
from prfaas.errors import ConfigError
from prfaas.wire.certificates import renew_due

INTERVAL_S = 6 * 3600.0


async def keep_identities(
    supervisor: Supervisor, deployment: Deployment, say: Callable[[str], None]
) -> None:
    """Renew what ends soon, every few hours, until cancelled."""
    while deployment.security.generate:
        await asyncio.sleep(INTERVAL_S)
        try:
            renewed = renew_parts(supervisor, deployment, datetime.datetime.now(datetime.UTC))
        except (ConfigError, OSError) as error:
            say(f"warning: identities cannot be renewed: {error}")
            continue
        if renewed:
            say(f"identities renewed: {', '.join(renewed)}")


def renew_parts(
    supervisor: Supervisor, deployment: Deployment, now: datetime.datetime
) -> list[str]:
    """Renew what ends soon of the parts started here, and have them read it; ConfigError if the
    authority cannot be read; returns names of the identities that are new."""
    due = renew_due(deployment.security.identities, identity_names(deployment), now)
    names = [identity.certificate.stem for identity in due]
    for change in supervisor.changes():
        if change.part.name not in names:
            continue
        process = change.part.process
        if change.phase in (Phase.READY, Phase.UNHEALTHY) and process is not None:
            # Pool nodes and gateways read their files again; an engine has no identity here.
            process.send_signal(signal.SIGHUP)
        elif change.phase is Phase.STARTING:
            # It may have read the old files, and cannot be notified yet.
            supervisor.ask_restart(change.part.name)
    return names
