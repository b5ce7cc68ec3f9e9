"""The answer as text, JSON, HTML and deployment settings."""
