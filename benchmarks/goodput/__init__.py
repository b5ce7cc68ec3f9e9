"""Rows of the policy tables, live: timing engines over the WAN lab, beside the simulator."""
