"""`prfaas ray`: the parts of a site as actors of a Ray cluster."""
