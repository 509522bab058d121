"""Sums over ranks: by the backend, or by our own algorithms of point-to-point messages.

Only `Link` calls torch.distributed. `Wire` is the interface of a collective to compressors.
"""
