"""Plan files in, the whole answer and its verdict out."""
