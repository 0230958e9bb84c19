"""KV formats: how blocks are coded and stored. One module a scheme; `registry` lists them.

`core.kv_choice` reads what a request asks for without them, as the HTTP process does.
"""
