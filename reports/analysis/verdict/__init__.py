"""What a study comes to, as facts and as sentences."""
