"""The audit log of a process: files, keys, the thread that writes, and what is recorded."""
