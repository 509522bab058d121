"""The proof that a cell trains."""
