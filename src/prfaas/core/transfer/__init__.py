"""Transfers between pools: states, tickets, and the sharing and pacing of links."""
