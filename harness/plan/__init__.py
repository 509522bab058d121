"""Planning: the request, the points of the matrix, the order of launches and their cost.

Nothing here imports torch, and nothing here starts a process or writes a file.
"""
