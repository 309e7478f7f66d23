"""The target language model: where it comes from, its tokenizer, its tapped features."""
