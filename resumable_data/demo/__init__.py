"""The demonstration: a training run that is killed again and again, beside one that never was."""
