"""Measure collectives within each rank."""
