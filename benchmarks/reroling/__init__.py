"""Roles of PD engines over a day whose load changes its mix: live, and simulated."""
