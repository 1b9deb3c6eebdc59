"""The checks every op goes through, in CI and on the user's own machine."""
