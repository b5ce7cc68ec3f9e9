"""Records, metrics, explanations and traces of what the gateway does."""
