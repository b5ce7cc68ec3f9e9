"""`prfaas plan`, `model`, `profile` and `simulate`."""
