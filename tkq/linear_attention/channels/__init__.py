"""Linear attention whose gates are of each column of k (GLA; with the delta rule KDA)."""
