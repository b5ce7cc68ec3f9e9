"""What crosses a connection: frames, messages, identities."""
