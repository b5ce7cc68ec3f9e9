"""Simulations that judge what the planner answers."""
