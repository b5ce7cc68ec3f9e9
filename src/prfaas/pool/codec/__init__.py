"""Lossless codecs: compiled kernels, and what a link uses them through."""
