"""OpenAI's requests and answers: allowed fields, validation, and one internal form."""
