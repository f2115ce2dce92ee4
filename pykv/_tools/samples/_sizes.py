"""Of the samples; random calls (tests/fuzz) and ``_served.py`` change them."""

NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEADS, HEAD_SIZE = 6, 4, 2, 4, 16
PACK = 4  # elements of 16 bytes
