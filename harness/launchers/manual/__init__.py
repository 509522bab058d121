"""Launches that a person starts by hand."""
