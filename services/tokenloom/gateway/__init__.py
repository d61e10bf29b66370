"""HTTP in OpenAI's format in front of the tokenizer stage. Thin: it never tokenises and never schedules."""
