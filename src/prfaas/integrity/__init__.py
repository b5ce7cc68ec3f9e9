"""Verification of transfers by a gateway, and the bar of sources that alter blocks.

A PD engine computes a selected transfer again under another salt, the PD pool compares both.
"""
