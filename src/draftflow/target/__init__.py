"""The target language model: where it comes from, its tokenizer, its tapped features."""

import os

# That PyTorch is missing is what transformers says of an environment that is meant to be without it.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
