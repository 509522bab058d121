"""Projections of a study's curves to sizes that were not measured, with bands and refusals."""
