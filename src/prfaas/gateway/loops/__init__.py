"""What runs beside requests: slow loops, replication, operators' changes, purges."""
