"""What a request has to wait for and is charged, before an engine gets it."""
