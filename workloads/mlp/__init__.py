"""Fully connected layers."""
