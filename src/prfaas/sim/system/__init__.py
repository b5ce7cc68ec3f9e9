"""What a run is made of: clock, requests, setup."""
