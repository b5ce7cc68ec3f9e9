"""Tickets at a pool node."""
