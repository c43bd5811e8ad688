"""Everything that is worth measuring on a GPU, in three resumable steps: `make evidence`."""
