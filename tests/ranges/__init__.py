"""Numbers of every file at the edge of their range and beyond."""
