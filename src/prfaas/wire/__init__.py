"""The protocol of connections: frames, messages, identities."""
