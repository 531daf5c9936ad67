"""Few long sequences, where gates forget: a block begins as many chunks in front of its segment as reach it."""
