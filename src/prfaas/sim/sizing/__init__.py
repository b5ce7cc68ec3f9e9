"""Simulations that check the planner's answers."""
