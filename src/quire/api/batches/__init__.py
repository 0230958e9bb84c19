"""Files and batches: requests that are answered when others leave room for them."""
