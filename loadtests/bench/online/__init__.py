"""``wisp bench online``: a live service under a closed loop with phases, divided by a policy and by fixed splits."""
