"""Records, metrics, explanations and traces of requests and decisions."""
