"""HTTP: one module a protocol, each a rendering of the one stream of events; errors in one place."""
