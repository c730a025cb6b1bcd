"""
Values of settings that the core does not know: --loss_type=sapo is `sapo` of extras/variants/
loss_type, a function or, where several belong together, a file of them.
"""
import os
from importlib import import_module

from common.files import ROOT

HERE = os.path.isdir(f"{ROOT}/extras/variants")     # it may have been deleted


def variant(setting, value):
    """What a value of a setting stands for."""
    return getattr(import_module(f"extras.variants.{setting}"), value)


def variants_of(setting):
    """The values that extras/variants knows of a setting; () where the folder was deleted."""
    if not HERE:
        return ()
    module = import_module(f"extras.variants.{setting}")
    homes = {name: getattr(x, "__module__", getattr(x, "__name__", ""))
             for name, x in vars(module).items() if name[0] != "_"}
    return tuple(sorted(name for name, home in homes.items() if home.startswith(module.__name__)))
