"""Programs that fill the marked parts of README.md and docs/ with figures, and draw pictures."""
