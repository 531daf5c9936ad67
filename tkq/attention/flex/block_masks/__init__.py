"""Block masks: which blocks of a mask are seen, and their lists: `tkq.create_block_mask`."""
