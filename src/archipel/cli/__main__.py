"""`python -m archipel.cli`."""

from archipel.cli import main

main()
