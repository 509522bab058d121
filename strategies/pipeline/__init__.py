"""`pipeline`: the blocks of a model in stages, one after another."""
