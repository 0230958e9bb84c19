"""Tools of the MCP servers that the operator names: listing them, and calling them."""
