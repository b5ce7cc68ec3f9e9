"""HTTP for clients: connections, TLS, bodies, answers, errors."""
