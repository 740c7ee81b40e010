"""Text to tokens and tokens to text: prompts, chat templates, tokenizers, and what ends a text."""
