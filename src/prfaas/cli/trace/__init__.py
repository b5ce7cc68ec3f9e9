"""`prfaas trace`: recorded workloads."""
