"""Predicts GEMM latency from a cost model and learned corrections; see `model.GemmModel`."""
