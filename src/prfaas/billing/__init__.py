"""Metering of usage in gateways and pool nodes, and the bill from their audit logs."""
