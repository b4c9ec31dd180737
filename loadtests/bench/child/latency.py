"""Decode and prefill of one engine: starting it takes longer than either."""

from __future__ import annotations

from collections.abc import Iterator

from loadtests.bench.child.bench import open_bench
from loadtests.bench.child.decode import decode_rows
from loadtests.bench.child.prefill import prefill_rows
from loadtests.bench.job import LatencyJob
from loadtests.rows import Row


def run_latency(job: LatencyJob) -> Iterator[Row]:
    """Rows of both, each with the benchmark that it belongs to."""
    with open_bench(job.engine) as bench:
        for row in decode_rows(bench, job.decode):
            yield {"benchmark": "decode"} | row
        if job.prefill is not None:
            for row in prefill_rows(bench, job.prefill):
                yield {"benchmark": "prefill"} | row
