"""State that the processes of a service share: Redis, and an in-memory twin."""
