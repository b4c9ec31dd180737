"""``python -m loadtests.service``: what ``wisp bench`` runs for benchmarks of a whole service."""

from loadtests.service.cli import main

main()
