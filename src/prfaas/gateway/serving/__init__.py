"""Steps of serving a request beside its legs."""
