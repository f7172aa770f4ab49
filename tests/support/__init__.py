"""What several test modules share: datasets, loaders from plain values, and fresh interpreters."""
