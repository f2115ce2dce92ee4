"""Of the samples; random calls (tests/fuzz) change them."""

NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEADS, HEAD_SIZE = 6, 4, 2, 4, 16
