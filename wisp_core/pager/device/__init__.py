"""Paging decided on the device: no host in the loop, so that a whole decode step fits one CUDA graph.

One layer and step, all on one stream:

    routed ids ─> plan kernel (one program) ─> slot ids ─────────────────────> fused MoE kernel
                        │ copy list, count ─> gather kernel (host ─> slots) ──────┘

`reference` is the algorithm in plain Python; the kernels in `plan_kernel` must equal it step by step.
"""
