"""Tests that compare with transformers' own functions."""

from tests.without_fla import import_models

import_models()
