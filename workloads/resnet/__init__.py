"""Residual networks."""
