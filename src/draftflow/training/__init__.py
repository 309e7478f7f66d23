"""Training: the plan of shapes, the worker, the loop, optimizer, checkpoints, metrics."""
