"""`single`: one device."""
