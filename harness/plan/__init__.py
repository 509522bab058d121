"""From what a user asks to what is run: the request, the matrix, the order of launches and their cost.

Nothing here imports torch, and nothing here starts a process or writes a file.
"""
