"""The HTTP endpoints, their authorisation, and the limit of concurrent requests."""
