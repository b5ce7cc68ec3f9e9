"""Verification of transfers by a gateway, and the bar of sources that alter blocks."""
