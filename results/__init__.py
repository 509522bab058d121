"""The ground floor: what was asked, what came out, and the files both are kept in.

Nothing here imports another package of this project, and nothing here imports torch.
"""
