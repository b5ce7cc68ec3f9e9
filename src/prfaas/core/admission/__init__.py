"""Admission: quotas, fair shares, slots, and refusal by predicted lateness."""
