"""Examine the node of a rank."""
