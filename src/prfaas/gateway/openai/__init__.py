"""OpenAI's requests and answers: what they may hold, checked, in one form."""
