"""Predicts the latency of GEMMs (matrix products) from a cost model and learned corrections."""
