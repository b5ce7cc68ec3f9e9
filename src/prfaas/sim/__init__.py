"""The simulator: the decisions of `prfaas.core`, on a virtual clock."""
