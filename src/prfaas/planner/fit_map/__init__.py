"""Map of where prefill-as-a-service pays: bandwidth, round trip, loss and prompt lengths."""
