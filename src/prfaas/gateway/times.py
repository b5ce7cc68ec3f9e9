"""Times of a gateway that no key of the deployment file sets."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.core.resilience.quarantine import SURVIVED_NS


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a gateway; in seconds where a name does not say ns.

    Attributes:
        purge_retry_s: Wait before an engine that could not forget its blocks is asked again.
        console_interval_s: Between two samples of the console.
        error_s: Limit for a client to read the error that ends its stream.
        suspect_survived_ns: Time after which a suspect prompt that runs holds up no other one, ns.
        rehearsal_s: An engine that does not answer a rehearsal by then is taken to agree.
        rehearsal_pause_s: For this time such an engine is not asked again by the same tenant: it is
            late already, and every request would wait `rehearsal_s` more.
    """

    purge_retry_s: float = 0.25
    console_interval_s: float = 1.0
    error_s: float = 5.0
    suspect_survived_ns: int = SURVIVED_NS
    rehearsal_s: float = 1.0
    rehearsal_pause_s: float = 10.0


TIMES = Times()
