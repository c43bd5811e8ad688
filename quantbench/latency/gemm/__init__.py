"""Predicts the latency of matrix products from a cost model and learned corrections."""
