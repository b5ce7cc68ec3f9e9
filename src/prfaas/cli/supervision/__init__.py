"""Supervision of the parts that `prfaas up` starts: each by itself, with a way to ask and steer."""
