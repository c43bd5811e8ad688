"""One sweep over many devices: who measures what, which cards are slow, and runs put together from several."""
