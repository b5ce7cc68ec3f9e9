"""Several processes that serve clients at one port; one, the gateway's own, that decides.

    clients ──► worker (HTTP, TLS, tokens, hashes, decode legs) ──messages──► decider (all else)
            ──► worker                                          ──HTTP──────►

A worker reads a request, makes its tokens and asks the decider, which runs it as if it had come to
its own port: one admission, one index, one machine, one record. Only the decode leg from the first
token on is carried out by the worker. What a worker does not serve it hands on as HTTP.
"""
