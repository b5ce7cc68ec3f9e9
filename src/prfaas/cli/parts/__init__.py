"""Commands that run one part of a deployment, or make what it needs."""
