"""The market: prices of compute and bytes, and the choice of the cluster of least cost."""
