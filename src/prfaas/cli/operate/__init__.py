"""Commands for operators of a running deployment."""
