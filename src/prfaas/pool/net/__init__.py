"""Sockets, the I/O threads, and tests of a link."""
