"""``wisp bench``: what paging, dividing and placing cost and gain."""

from __future__ import annotations

import typer

from services.cli.passed_on import pass_on

app = typer.Typer(no_args_is_help=True, help="Measure what paging costs and gains, beside vLLM's own offloaders.")

pass_on(
    app,
    "loadtests.bench",
    {
        "decode": "Time per decode step: resident, paged, and offloaded by vLLM.",
        "prefill": "Time to first token.",
        "latency": "decode and prefill with one engine for each mode.",
        "budget": "Peak of GPU memory by the driver while another process holds the rest of the card.",
        "identity": "Tokens and log-probabilities of paged engines against resident ones, on a GPU.",
        "return": "First token of a session that returns: prefix on the device, in host memory, or computed again.",
        "resize": "Pause of the engine while memory moves between experts and KV.",
        "online": "A live service whose work has phases: divided online, and by every static split.",
        "balloon": "How soon KV blocks leave a pool in use: by the balloon, and behind a drained barrier.",
        "prefetch": "Prefetch of predicted experts, on against off.",
        "service": "A whole service under load: budget from outside, an engine killed, every token compared.",
        "pager-overhead": "What paging costs by itself.",
    },
)
pass_on(
    app,
    "loadtests.service",
    {
        "fairness": "What a tenant that floods, and one that thrashes the expert cache, cost another.",
        "faults": "Parts of a service killed while turns run: lost turns, recovery times, answers.",
        "streams": "Many streams held open at once.",
        "malformed": "Broken and hostile requests; none may get a 5xx.",
    },
)
pass_on(
    app,
    "loadtests.placement",
    {
        "routing": "Time of a routing decision, and its regret against scoring every replica.",
        "placement": "Expert copies and latency by router, on simulated or on real replicas.",
        "overhead": "What ingress and router add to a turn.",
        "co-schedule": "Turns whose experts fit started together, against first come, first served.",
        "working-sets": "How well working sets are foretold, and what counting them costs.",
    },
)
