"""Sessions: requests that wait for earlier answers."""
