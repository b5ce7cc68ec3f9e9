"""Lossless codecs of links: which block is coded, what that gains, and when a link codes."""
