"""The pool node: a store of KV blocks beside the engines of a host, and the link to other pools.

A process with an event loop for messages, an I/O thread or several for bytes of links, threads that
verify digests and access disks, and a thread that copies rows of engines.
"""
