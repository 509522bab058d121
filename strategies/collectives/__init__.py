"""How a sum over ranks is made: by the backend, or by algorithms of our own from point-to-point sends.

`Link` is the one border to torch.distributed. `Wire` is what a compressor sees of a collective.
"""
