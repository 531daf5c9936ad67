"""Few long sequences, where gates forget: segments that overlap, each warmed up by the chunks in front of it."""
