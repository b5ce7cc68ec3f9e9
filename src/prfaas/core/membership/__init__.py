"""Membership of a site: engines, pool nodes and gateways that join, drain and leave."""
