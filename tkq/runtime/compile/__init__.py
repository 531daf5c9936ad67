"""From a recipe to a kernel in memory: sources, keys, the cache, bundles, the compiler."""
