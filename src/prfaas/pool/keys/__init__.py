"""Keys: the file of the site's keys, sealing, and keys of tenants."""
