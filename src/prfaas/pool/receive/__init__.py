"""The receiving end of a link: connections, blocks in assembly, transfers, and pulls.

Fragments are read to the place of their block. The receiver acknowledges blocks and commits.
"""
