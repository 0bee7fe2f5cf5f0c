"""The second door onto ``api/``: the same endpoints over TCP, with sessions, keys and limits."""
