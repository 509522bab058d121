"""`randomk`: random elements."""
