"""What tenants may use at once, and what they are charged."""
