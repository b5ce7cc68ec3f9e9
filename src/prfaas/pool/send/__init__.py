"""The sending end of a link: transfers, connections, pace and budget.

All data connections take the next fragment from one queue. Unacknowledged blocks are sent again.
"""
