"""Tools of the MCP servers that the operator names: what there is, and one call."""
