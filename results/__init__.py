"""The ground floor: the types of plans, runs and results, and their files.

It imports neither another package of this project nor torch.
"""
