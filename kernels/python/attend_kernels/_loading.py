# SPDX-License-Identifier: Apache-2.0
"""Where a shared library of attend's may be, for the modules that call it through ctypes."""

import ctypes
import os
import pathlib


def candidates(module, name, room, environment):
    """Where `name` may be, first choice first: named by the environment, installed with the package
    of `module`, or built from the sources, below the `room` of a build folder."""
    folder = pathlib.Path(module).resolve().parent
    if os.environ.get(environment):
        return [pathlib.Path(os.environ[environment])]  # named and not there is a mistake
    around = list(folder.parents)
    found = [folder / name, around[0].parent / "lib" / name]
    if len(around) > 2:  # ROOT/kernels/python/attend_kernels, ROOT/client/python/attend
        root = around[2]
        found += [root / "build" / preset / room / name for preset in ("cuda", "release", "dev")]
        found.append(root / "dist/lib" / name)
    return found


def load(paths, name, environment):
    """The library at the first of the paths where one is, or as the system's loader finds it.
    OSError says where it was looked for."""
    found = next((str(place) for place in paths if place.is_file()), None)
    try:
        return ctypes.CDLL(found or (name if len(paths) > 1 else str(paths[0])))
    except OSError as failure:
        looked = ", ".join(str(place) for place in paths)
        raise OSError(f"{name} was not loaded ({failure}); looked at {looked}; "
                      f"${environment} names it") from None
