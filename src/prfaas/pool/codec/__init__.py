"""Lossless codecs: compiled kernels, and their interface for links."""
