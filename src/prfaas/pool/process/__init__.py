"""A pool node's process: the node, and the annexes that follow its facts."""
