"""``wisp simulate``: workloads on simulated replicas; policies against the oracle, and how fast the simulator is."""
