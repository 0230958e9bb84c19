"""Images that requests bring: fetched safely, decoded, cut as the model's encoder takes them."""
