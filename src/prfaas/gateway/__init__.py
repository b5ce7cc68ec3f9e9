"""The HTTP edge: OpenAI's API outside, two legs and a transfer inside.

A request passes these packages in this order:

    http, openai   connections, bodies checked and stripped
    api            who may ask, how many at once, the endpoints
    tokenization   token ids, only of what is new
    serving        the decision, both legs, fallback, the answer
    engines        posts to engines, knows who is ready
    pools          follows pool nodes, signs tickets
    telemetry      what happened
"""
