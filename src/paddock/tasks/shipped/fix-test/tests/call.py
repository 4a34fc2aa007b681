"""Call functions of modules in the work folder. Its text is run by `paddock-run`, apart from the tests.

Reads a list of [module, function, arguments] as JSON and prints the list of results. What the called code
prints goes to standard error.
"""

import importlib
import json
import os
import sys


def call(module, function, arguments):
    try:
        return {"result": getattr(importlib.import_module(module), function)(*arguments)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


# Compiled code that lies around in the work folder need not be what its source says.
sys.pycache_prefix = os.devnull
sys.path.insert(0, os.getcwd())
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
json.dump([call(*wanted) for wanted in json.load(sys.stdin)], answers, default=str)
answers.close()
