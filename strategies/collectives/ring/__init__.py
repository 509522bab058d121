"""`ring`: around a ring of sends."""
