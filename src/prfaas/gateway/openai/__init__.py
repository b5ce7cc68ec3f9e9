"""What requests may hold: fields and media, by allow-list."""
