"""Sessions: requests that wait for the answers before them."""
