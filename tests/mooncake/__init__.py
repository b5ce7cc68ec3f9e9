"""A Mooncake Store on loopback: the real master, and real providers in processes of their own."""
