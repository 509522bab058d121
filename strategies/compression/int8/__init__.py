"""`int8`: 8 bits with a scale a block."""
