"""The audit log: chained lines, signed checkpoints, and their verification."""
