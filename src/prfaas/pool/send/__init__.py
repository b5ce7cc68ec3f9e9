"""The sending end of a link."""
