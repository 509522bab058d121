"""How a training step is distributed: the strategies, and the one Trainer that drives them.

`strategies.catalog` says what there is without importing torch.
"""
