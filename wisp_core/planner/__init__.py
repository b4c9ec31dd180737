"""The offline configurator: from a model's config and a card to a split, and what it will do."""
