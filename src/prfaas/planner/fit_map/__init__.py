"""The map of the verdict over bandwidth, round trip, loss and prompt lengths."""
