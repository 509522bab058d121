"""`powersgd`: a low-rank approximation."""
