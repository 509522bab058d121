"""Predictions in closed form, without torch: memory (`footprint`) and messages (`traffic`) of a step."""
