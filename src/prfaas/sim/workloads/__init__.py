"""What arrives: synthetic requests, recorded traces, and sessions whose turns await answers."""
