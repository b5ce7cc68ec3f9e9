"""Tables of tiers that the pool nodes of a cluster share."""
