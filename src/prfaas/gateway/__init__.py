"""The HTTP edge: OpenAI's API outside, two legs and a transfer inside.

A request passes through these modules, in this order:

    app        requests in, start and stop               (views, failures)
    requests   the body, checked and stripped            (fields, messages)
    deciding   token ids, cache hits, the policy's word  (tokenizing, subscription → core)
    encoding   token ids, only of what is new            (cutting, cuts, span_cache)
    flow       both legs, fallback                       (prefill, decode, pulling, exchange)
    engines    posts to engines, knows who is ready      (bodies, engine_answers)
    pools      follows pool nodes and transfers          (subscription, transfers)
    replies    the engine's answer in the client's words (sse, usage, answering)
    records    what happened                             (metrics)
"""
