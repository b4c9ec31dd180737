"""A discrete-event model of replicas, in which any policy and any router can be judged before it serves."""
