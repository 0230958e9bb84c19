"""KV formats: how blocks are coded and stored. One module a scheme; `registry` lists them.

`choose` imports no mlx: the HTTP process reads what a request asks for with it.
"""
