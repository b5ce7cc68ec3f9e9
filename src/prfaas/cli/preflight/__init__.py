"""Checks of a deployment before its parts serve together."""
