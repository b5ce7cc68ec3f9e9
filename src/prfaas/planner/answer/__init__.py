"""Reads a plan file, computes the answer, words the verdict."""
