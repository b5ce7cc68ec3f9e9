"""The answer to a plan file: loading, computation, and the sentence of the verdict."""
