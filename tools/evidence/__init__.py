"""Measures a GPU with three resumable commands (`run`) and writes the evidence page from their results (`write`)."""
