"""Transfers between pools: states, tickets, and the sharing and pacing of links.

A transfer is offered with its ticket and list of blocks, accepted or refused, sent, and committed,
aborted or expired. Both ends check the ticket. Links share bytes between transfers and tenants.
"""
