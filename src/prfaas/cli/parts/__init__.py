"""Commands that run one part of a deployment or create its files."""
