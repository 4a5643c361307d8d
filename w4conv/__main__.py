"""`python -m w4conv`."""

from w4conv.cli.main import main

main()
