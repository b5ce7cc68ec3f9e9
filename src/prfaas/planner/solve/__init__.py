"""The equations of the paper and the search for the best plan."""
