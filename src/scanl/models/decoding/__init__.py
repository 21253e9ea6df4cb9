"""Generation token by token: sampling, sessions, states kept, drafts, many texts at once, the compiled step."""
