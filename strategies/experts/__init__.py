"""Expert parallelism: each rank has some of the experts of a layer."""
