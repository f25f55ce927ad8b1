"""A torch session: forward, backward, optimizer, state, profile."""
