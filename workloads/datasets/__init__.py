"""What models are trained on: the facts of each data set, torch-free, and its samples."""
