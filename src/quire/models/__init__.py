"""One module a family; `registry` names them, `loader` opens them, `base` is their contract."""
