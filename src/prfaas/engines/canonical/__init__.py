"""Rows of an engine as copies between ranks and canonical blocks."""
