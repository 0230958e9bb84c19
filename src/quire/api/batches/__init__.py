"""Files and batches: requests answered in the background, at the lowest priority."""
