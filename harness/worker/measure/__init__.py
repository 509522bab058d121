"""Timed blocks of steps, and what is sampled or profiled with them."""
