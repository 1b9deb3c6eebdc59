"""The spine every operation stands on: operators, plans, guarantees, errors and kernels."""
