"""The decisions: pure, synchronous, without clock, I/O or randomness of their own."""
