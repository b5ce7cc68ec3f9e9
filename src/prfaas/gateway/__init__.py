"""The HTTP edge: OpenAI's API outside, two legs and a transfer inside.

A request passes through these modules, in this order:

    app        routes, errors, start and stop
    requests   the body, checked and stripped            (fields, messages)
    deciding   token ids, cache hits, the policy's word  (tokenizing, subscription → core)
    flow       both legs, fallback                       (prefill, bodies, engines, pools)
    replies    the engine's answer in the client's words (sse, usage, answering)
    records    what happened                             (metrics)
"""

from prfaas.gateway.app import serve
from prfaas.gateway.endpoints import Endpoints

__all__ = ["Endpoints", "serve"]
