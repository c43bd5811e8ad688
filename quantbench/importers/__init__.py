"""Foreign tables become runs like our own: `origin: imported`, with where each figure comes from."""
