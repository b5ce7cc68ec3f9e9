"""Local engines: their shared memory, and the socket they use."""
