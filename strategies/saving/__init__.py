"""What outlives a training run: checkpoints that training goes on from, and the trained model by itself."""
