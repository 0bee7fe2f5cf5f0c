"""Learning from served conversations: turns, judges, hints and what becomes of them."""
