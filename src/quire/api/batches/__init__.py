"""Files and batches: requests answered in the background, behind live ones."""
