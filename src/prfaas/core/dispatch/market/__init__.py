"""Routes of a request as offers of the market."""
