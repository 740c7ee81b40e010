"""Text to tokens and tokens to text: prompts, chat templates, tokenizers, stop strings."""
