# SPDX-License-Identifier: Apache-2.0
"""Searches for attend's shared libraries, for the modules that call them through ctypes."""

import ctypes
import os
import pathlib


def candidates(module, name, room, environment):
    """Paths where `name` may be, in order of preference: the one in the environment variable,
    installed with the package of `module`, or built from the sources, below `room` of a build
    folder."""
    folder = pathlib.Path(module).resolve().parent
    if os.environ.get(environment):
        return [pathlib.Path(os.environ[environment])]  # if it does not exist, that is an error
    around = list(folder.parents)
    found = [folder / name, around[0].parent / "lib" / name]
    if len(around) > 2:  # ROOT/kernels/python/attend_kernels, ROOT/client/python/attend
        root = around[2]
        found += [root / "build" / preset / room / name for preset in ("cuda", "release", "dev")]
        found.append(root / "dist/lib" / name)
    return found


def load(paths, name, environment):
    """The library from the first path that exists, or through the system's loader. OSError names
    the paths tried."""
    found = next((str(place) for place in paths if place.is_file()), None)
    try:
        return ctypes.CDLL(found or (name if len(paths) > 1 else str(paths[0])))
    except OSError as failure:
        looked = ", ".join(str(place) for place in paths)
        raise OSError(f"{name} was not loaded ({failure}); looked at {looked}; "
                      f"${environment} names it") from None
