"""Who is let in: quotas, fair shares, slots, and refusal by predicted lateness."""
