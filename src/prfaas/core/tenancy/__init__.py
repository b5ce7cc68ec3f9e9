"""What tenants share and are charged for: engines' sequences, and output tokens."""
