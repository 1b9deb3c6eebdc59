"""`python -m adjoint` is the `adjoint` command."""

from adjoint.cli import main

main()
