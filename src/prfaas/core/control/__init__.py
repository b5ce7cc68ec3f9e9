"""The control loops: threshold, roles of instances, replication of hot prefixes."""
