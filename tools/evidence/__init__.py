"""Measures what is worth measuring on a GPU, in three resumable steps (`make evidence`), and writes its page."""
