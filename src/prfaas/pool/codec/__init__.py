"""Codecs of links, lossless and rounding: compiled kernels; `core/codec` has their names."""
