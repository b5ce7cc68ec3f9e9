"""Background work: control loops, replication, operators' changes."""
