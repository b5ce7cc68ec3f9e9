"""Where a request is prefilled, and from which predictions."""
