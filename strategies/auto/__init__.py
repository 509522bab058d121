"""`auto`: the plan chooses another strategy in its place."""
