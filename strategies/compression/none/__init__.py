"""`none`: gradients as they are."""
