"""Programs that maintainers run from a checkout. They are not part of the wheel."""
