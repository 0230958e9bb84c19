"""The families of models, a module for each who publishes them."""
