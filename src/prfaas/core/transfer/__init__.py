"""Transfers of KV blocks between clusters."""
