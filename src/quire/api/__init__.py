"""HTTP: one module a protocol, each a rendering of one stream of events; errors in one place."""
