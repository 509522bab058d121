"""The steps of a gradient before it is sent: compensate, compress, exchange, decompress.

A `Compressor` does the four for one bucket; `memory` keeps the residual of each bucket.
"""
