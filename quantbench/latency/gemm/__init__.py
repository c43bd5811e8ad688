"""Models the latency of matrix products (`model.GemmModel`)."""
