"""`prfaas up`, `check` and `demo`: a deployment on this machine."""
