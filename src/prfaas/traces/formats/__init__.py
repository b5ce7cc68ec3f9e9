"""The formats, one reader each."""
