"""The verdict of a study, as facts and as sentences."""
