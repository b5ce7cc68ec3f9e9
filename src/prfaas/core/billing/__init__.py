"""The bill: usage by tenant, phase, cluster and class of service, and its cost."""
