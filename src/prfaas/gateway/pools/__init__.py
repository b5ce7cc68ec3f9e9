"""Pool nodes: connections to them, their events, tickets and pulls."""
