"""Optional features of a decode step, one file each."""

from hisparse.engine.extensions.base import Components, Extension, register_extension

__all__ = ["Components", "Extension", "register_extension"]
