"""Attention of many queries of each sequence over a cache: chunked prefill, by the forward's consumers."""
