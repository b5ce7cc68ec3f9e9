"""Token ids and block hashes of prompts, per tenant and within limits."""
