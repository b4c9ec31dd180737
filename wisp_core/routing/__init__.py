"""Which replica a turn goes to: filter, then score in predicted seconds, then pick. Pure functions."""
