"""Optimizers: what is known of each, without torch."""
