"""The prefix cache: pages, and the tree that says whose tokens they hold. No torch here."""
