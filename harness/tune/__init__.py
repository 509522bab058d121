"""Tuning: the space of settings, the race that finds the fastest that fits, and the answer."""
