"""Sites that share a PrfaaS cluster by contract: whose a tag is, and whose turn it is. Pure."""
