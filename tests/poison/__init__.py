"""A pool node that alters blocks: what its answers cost, and what a purge leaves of them."""
