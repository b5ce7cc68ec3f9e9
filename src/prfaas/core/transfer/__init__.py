"""Transfers between pools: their states, their tickets, how links are shared and paced."""
