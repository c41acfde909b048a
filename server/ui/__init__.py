"""Pages for people. They need no script and nothing from elsewhere."""
