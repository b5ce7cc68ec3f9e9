"""Orders of operators on the blocks of one prompt: pins in memory, and copies to another pool."""
