"""Background work: control loops, replication, operators' changes, purges.

A purge has an order: pool nodes bar and drop, engines forget, the bars end. It is repeated from a
file until all parts are done.
"""
