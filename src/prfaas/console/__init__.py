"""Tools of the console for operators: signing in, the list of requests, and figures over time.

The page and the live state are the gateway's (`gateway/console`).
"""
