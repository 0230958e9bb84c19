"""Model families, one module for each publisher."""
