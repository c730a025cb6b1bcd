"""
Values of settings beyond the core's own: --loss_type=sapo finds `sapo` in extras/variants/
loss_type, a function or, where several belong together, a file of them.
"""
import os
from importlib import import_module

from common.files import ROOT


def variant(setting, value):
    """The function, or file of functions, that a value of a setting names."""
    return getattr(import_module(f"extras.variants.{setting}"), value)


def variants_of(setting):
    """The values of a setting that extras/variants has; () if the folder was deleted."""
    if not os.path.isdir(f"{ROOT}/extras/variants"):
        return ()
    module = import_module(f"extras.variants.{setting}")
    homes = {name: getattr(x, "__module__", getattr(x, "__name__", ""))
             for name, x in vars(module).items() if name[0] != "_"}
    return tuple(sorted(name for name, home in homes.items() if home.startswith(module.__name__)))
