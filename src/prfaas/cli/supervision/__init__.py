"""Supervision of the parts that `prfaas up` starts, and the control socket."""
