"""What measurements mean: figures derived from raw samples, steps along an axis, and what explains them."""
