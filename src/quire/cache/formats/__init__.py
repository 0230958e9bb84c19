"""KV formats: how blocks are coded and stored. One module for each scheme; `registry` lists them.

The HTTP process parses a request's format by `core.kv_choice`, without these modules.
"""
