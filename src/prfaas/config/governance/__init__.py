"""Governance: rules of the deployment file on who may compute where."""
