"""What maintainers run from a checkout and users never import; not part of the wheel."""
