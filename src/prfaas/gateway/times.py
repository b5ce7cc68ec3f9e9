"""Times of a gateway that no key of the deployment file sets."""

from dataclasses import dataclass

from prfaas.core.resilience.quarantine import SURVIVED_NS


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a gateway; in seconds where a name does not say ns."""

    purge_retry_s: float = 0.25  # wait before an engine is asked again to forget its blocks
    purge_repeat_s: float = 30.0  # before a purge that is not done is repeated; doubles
    console_interval_s: float = 1.0  # between two samples of the console
    incident_grace_s: float = 5.0  # after the start, in which no alarm begins an incident
    stream_head_s: float = 0.5  # a stream without a token by then gets its head
    stream_comment_s: float = 10.0  # between two comments of a stream without a token
    error_s: float = 5.0  # limit for a client to read the error that ends its stream
    suspect_survived_ns: int = SURVIVED_NS  # then a suspect prompt holds up no other one
    rehearsal_s: float = 1.0  # an engine that does not answer by then is taken to agree
    rehearsal_pause_s: float = 10.0  # a late engine is not asked again by the same tenant


TIMES = Times()
