"""Sockets, the I/O thread, and tests of a link."""
