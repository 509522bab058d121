"""Files that outlive a training run: checkpoints to resume from, and the trained model."""
