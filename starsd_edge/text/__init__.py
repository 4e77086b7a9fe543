"""Text of people and tokens of models: tokenizer, templates, streaming text, stop strings. Pure."""
