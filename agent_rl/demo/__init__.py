"""The demo: an agent that serves a small shop's customers, and its training on the small model."""
