"""Codecs of links: which block is coded, what that gains, and when a link codes; quality classes,
and the rounded forms of blocks."""
