"""A command that logs."""

from __future__ import annotations

import logging

from prfaas.cli.common.options import logs
from prfaas.logs import log_event


@logs
def say() -> None:
    log_event(logging.getLogger("prfaas.test"), logging.INFO, "said", request_id="r1")
