"""An S3 server on loopback, and a proxy before it that breaks answers."""
