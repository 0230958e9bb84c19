"""KV formats: how pages are stored, written and read. One module a scheme; `registry` lists them.

`choose` and `names` import no mlx: the HTTP process reads what a request asks for with them.
"""
