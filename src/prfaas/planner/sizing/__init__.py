"""Plans for a target and a demand: the rate within a P90 target, and the cheapest fleet."""
