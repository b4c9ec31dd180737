"""``python -m loadtests.bench``: the benchmarks without the ``wisp`` command, which needs the service's packages."""

from loadtests.bench.cli import main

main()
