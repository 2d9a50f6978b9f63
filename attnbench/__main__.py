"""`python -m attnbench`."""

from attnbench.cli.app import main

main()
