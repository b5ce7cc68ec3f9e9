"""Deployment files."""
