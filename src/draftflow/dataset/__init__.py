"""The dataset: reading prompts, responses, chat template and loss mask, packed rows."""
