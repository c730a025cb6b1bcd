"""Losses by name: each file of this folder, of functions that a config file may have, too
(docs/hooks.md)."""
from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
