"""Verification of received blocks: which transfers, how blocks are compared, and who is barred."""
