"""From times of single operations to whole training layouts: memory, time per iteration, and the search over both."""
