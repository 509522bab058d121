"""Data sets that models are trained on: the facts of each, torch-free, and its samples."""
