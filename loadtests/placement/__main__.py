"""``python -m loadtests.placement``: what ``wisp bench`` calls."""

from loadtests.placement.cli import main

main()
