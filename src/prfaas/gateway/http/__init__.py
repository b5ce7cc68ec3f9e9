"""HTTP towards clients: connections, TLS, bodies, answers, errors."""
