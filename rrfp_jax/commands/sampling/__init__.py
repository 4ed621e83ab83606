"""Text of a trained model: prompts in, tokens one after the other, text out."""
