"""Does Prefill-as-a-Service pay, and with what settings."""
