"""The accuracy tables of docs/accuracy.md, computed from public measured tables (extra `tables`)."""
