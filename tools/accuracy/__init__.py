"""Computes the accuracy tables of docs/accuracy.md from public measured tables (extra `tables`)."""
