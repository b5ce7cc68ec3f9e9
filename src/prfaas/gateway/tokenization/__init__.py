"""Tokenizer state: which threads and caches a tenant's texts go through, and what they may cost."""
