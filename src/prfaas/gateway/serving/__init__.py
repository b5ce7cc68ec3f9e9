"""The life of a request: the decision, both legs, hedges and pulls, the stream, fallback."""
