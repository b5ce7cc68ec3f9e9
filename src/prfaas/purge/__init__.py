"""Purges: what is dropped, in which order, and the intents that survive a crash.

A purge has an order: pool nodes bar and drop, engines forget, the bars end. It is repeated from a
file until all parts are done.
"""
