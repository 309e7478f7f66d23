"""The compile cache: where it lives, what its key holds, warm-up and guard."""
