"""``python -m loadtests.simulate``: what ``wisp simulate`` runs."""

from loadtests.simulate.cli import main

main()
