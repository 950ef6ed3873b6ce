"""`python -m fewstep` is the command `fewstep`."""

from fewstep.cli import main

main()
