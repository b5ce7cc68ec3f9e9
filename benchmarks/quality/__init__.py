"""Quality of rounded KV caches: a small model that recalls, trained here."""
