"""Facts about devices, with their sources: `gpus.csv`, one row a GPU, read by `results.catalogue.gpus`."""
