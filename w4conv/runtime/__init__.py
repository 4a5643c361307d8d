"""A container runs: tokenizer, chat, engine, sessions, sampling, generation."""
