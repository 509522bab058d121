"""The exchange of gradients in buckets: any compressor over any collective, beside the backward pass."""
