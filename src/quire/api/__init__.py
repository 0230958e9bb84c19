"""HTTP: a package for each protocol, which renders the same stream of events. Errors are mapped in
one place.
"""
