"""The receiving end of a link."""
