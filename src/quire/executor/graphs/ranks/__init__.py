"""Records what the ranks of a split model exchange within a step."""
