"""Tests of sites that share a cluster."""
