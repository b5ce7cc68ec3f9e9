"""The tier of a site in a Mooncake Store: sealed blocks in the memory of several hosts."""
