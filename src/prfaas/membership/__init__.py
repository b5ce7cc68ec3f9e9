"""Sources of a site's members, and the follower that connects and disconnects them.

A source sends its whole current list. The core's machine compares it with the members that have
joined; one that is not listed any more drains. Another address is a leave and a join.
"""
