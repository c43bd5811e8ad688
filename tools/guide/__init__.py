"""Programs that fill marked places of README and docs/ with figures, and draw the pictures."""
