"""KV blocks: their names, who holds which, and what has to agree before engines can share them.

The prefix index maps blocks to the sources that hold them, 12 bytes a block, and answers for all
sources of a prompt in one pass. A collision of its short keys causes a miss, never a wrong block.
"""
