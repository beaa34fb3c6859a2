"""What a training shows of itself: progress, metrics, their plot, and the model card."""
