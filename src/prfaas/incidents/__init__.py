"""Incidents: the alarms of a deployment, the log of what has happened to it, and their pages."""
